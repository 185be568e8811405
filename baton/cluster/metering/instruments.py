"""Prometheus instruments made of the definitions in ``metrics``, and the same figures under vLLM's names.

Knows nothing of what is measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from baton.cluster.metering.metrics import VLLM_PREFIX, Metric


class ManyHistogram(Histogram):
    """A histogram that takes values counted elsewhere at the price of one: an answer has a gap for each token."""

    def observe_many(self, counts: Mapping[int, int], total: float) -> None:
        """Adds ``counts`` values, by number of bucket, which are ``total`` together."""
        self._sum.inc(total)
        for bucket, count in counts.items():
            self._buckets[bucket].inc(count)

    def exemplify(self, value: float, labels: dict[str, str] | None, at: float) -> None:
        """Attaches ``labels`` to one of the values that were counted, at ``at`` seconds since 1970."""
        if labels is not None:
            self._buckets[bisect_left(self._upper_bounds, value)].set_exemplar(Exemplar(labels, value, at))


class NullInstrument:
    """Takes what an instrument takes, and keeps nothing: telemetry that is off."""

    def labels(self, *values: str, **labels: str) -> NullInstrument:
        """Returns itself, whatever the labels are."""
        return self

    def set(self, *_: object, **__: object) -> None:
        """Ignores the value, as all its methods do."""

    inc = dec = observe = observe_many = exemplify = set_function = clear = set

    def track_inprogress(self) -> AbstractContextManager[None]:
        """Returns a context that counts nothing."""
        return nullcontext()


Instrument = Counter | Gauge | Histogram
_KINDS: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": ManyHistogram}
VLLM_LABELS = {"model": "model_name", "outcome": "finished_reason", "worker": "engine"}


class PendingTotal:
    """Keeps what is ``added`` until somebody asks for it, and tells it a counter or gauge together.

    As a context: one more while the block runs.
    """

    __slots__ = ("_instrument", "added")

    def __init__(self, instrument: Any) -> None:
        self._instrument, self.added = instrument, 0

    def __enter__(self) -> None:
        self.added += 1

    def __exit__(self, *_: object) -> None:
        self.added -= 1

    def tell(self) -> None:
        """Tells the instrument the sum of what was added since the last call."""
        added, self.added = self.added, 0
        if added:
            self._instrument.inc(added)


class ScrapeListener(Collector):
    """Hears of each scrape before the instruments that are registered after it show what they hold."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def before(self, call: Callable[[], object]) -> None:
        """Has ``call`` tell the instruments what it kept back; the last ``call`` given is made first."""
        self._calls.insert(0, call)

    def now(self) -> None:
        """Makes all calls, because somebody is about to read the instruments."""
        for call in self._calls:
            call()

    def describe(self) -> Iterable[Family]:
        """Describes no metric of its own."""
        return []

    def collect(self) -> Iterable[Family]:
        """Collects no metric of its own, and makes all calls."""
        self.now()
        return []


def make_nothing(definitions: Mapping[str, Metric]) -> dict[str, Any]:
    """Returns one instrument that does nothing per definition."""
    return dict.fromkeys(definitions, NullInstrument())


def make(definitions: Mapping[str, Metric], registry: CollectorRegistry) -> dict[str, Any]:
    """Returns one instrument per definition, by the same key."""
    return {key: _make(metric, registry) for key, metric in definitions.items()}


def _make(metric: Metric, registry: CollectorRegistry) -> Instrument:
    more = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
    made: Instrument = _KINDS[metric.kind](metric.full_name, metric.help, metric.labels, registry=registry, **more)
    return made


class VllmNames(Collector):
    """Shows the instruments whose definition has a vLLM name once more, under it."""

    def __init__(self, definitions: Mapping[str, Metric], made: Mapping[str, Any]) -> None:
        self._named = [(metric, made[key]) for key, metric in definitions.items() if metric.vllm or metric.vllm_by]

    def describe(self) -> Iterable[Family]:
        """Describes nothing ahead of time, because the names are ours to know."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yields the same figures under vLLM's names; those of some label values as families of their own."""
        for metric, instrument in self._named:
            for family in instrument.collect():
                if metric.vllm:
                    yield _renamed(family, VLLM_PREFIX + metric.vllm)
                for value, name in metric.vllm_by:
                    yield _renamed(family, VLLM_PREFIX + name, metric.labels[-1], value)


def _renamed(family: Family, name: str, label: str = "", value: str = "") -> Family:
    """With ``label``, only the samples that have ``value`` there, and without it."""
    other = Family(name, family.documentation, family.type)
    other.samples = [
        Sample(name + s.name.removeprefix(family.name), _labels(s.labels, label), s.value, s.timestamp, s.exemplar)
        for s in family.samples
        if not label or s.labels[label] == value
    ]
    return other


def _labels(labels: Mapping[str, str], without: str = "") -> dict[str, str]:
    return {VLLM_LABELS.get(key, key): value for key, value in labels.items() if key != without}
