"""Prometheus instruments made from the definitions in ``metrics``, and their copies under vLLM's names.

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
    """A histogram that can add many pre-bucketed values in one call, because an answer has a gap for each token."""

    def observe_many(self, counts: Mapping[int, int], total: float) -> None:
        """Adds ``counts``, bucket number -> values, whose sum is ``total``."""
        self._sum.inc(total)
        for bucket, count in counts.items():
            self._buckets[bucket].inc(count)

    def exemplify(self, value: float, labels: dict[str, str] | None, at: float) -> None:
        """Attaches ``labels`` as exemplar to the bucket of ``value``, timed ``at`` Unix seconds; None does
        nothing.
        """
        if labels is not None:
            self._buckets[bisect_left(self._upper_bounds, value)].set_exemplar(Exemplar(labels, value, at))


class NullInstrument:
    """Has the methods of every instrument and does nothing, for telemetry that is off."""

    def labels(self, *values: str, **labels: str) -> NullInstrument:
        """Returns this object, whatever the labels are."""
        return self

    def set(self, *_: object, **__: object) -> None:
        """Does nothing; stands for every other method too."""

    inc = dec = observe = observe_many = exemplify = set_function = clear = set

    def track_inprogress(self) -> AbstractContextManager[None]:
        """Returns a context manager that does nothing."""
        return nullcontext()


Instrument = Counter | Gauge | Histogram
AnyInstrument = Any  # the definition's kind says at run time which of Instrument it is, or NullInstrument
_KINDS: dict[str, Callable[..., Instrument]] = {
    "counter": Counter,
    "gauge": Gauge,
    "histogram": ManyHistogram,
}
VLLM_LABELS = {"model": "model_name", "outcome": "finished_reason", "worker": "engine"}


class PendingTotal:
    """Buffers increments of a counter or gauge in ``added`` until ``tell``.

    As a context manager, adds 1 while the block runs.
    """

    __slots__ = ("_instrument", "added")

    def __init__(self, instrument: Counter | Gauge) -> None:
        self._instrument, self.added = instrument, 0

    def __enter__(self) -> None:
        self.added += 1

    def __exit__(self, *_: object) -> None:
        self.added -= 1

    def tell(self) -> None:
        """Adds to the instrument the sum of what was added since the last call."""
        added, self.added = self.added, 0
        if added:
            self._instrument.inc(added)


class ScrapeListener(Collector):
    """Runs callbacks at each scrape, before the instruments that are registered after it are read."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def before(self, call: Callable[[], object]) -> None:
        """Adds a callback to run before each scrape; the last one added runs first."""
        self._calls.insert(0, call)

    def now(self) -> None:
        """Runs all callbacks, because the instruments are about to be read."""
        for call in self._calls:
            call()

    def describe(self) -> Iterable[Family]:
        """Returns no metric family, because this collector has none."""
        return []

    def collect(self) -> Iterable[Family]:
        """Runs all callbacks and returns no metric family."""
        self.now()
        return []


def make_nothing(definitions: Mapping[str, Metric]) -> dict[str, AnyInstrument]:
    """Returns a NullInstrument for each definition, by the same key."""
    return dict.fromkeys(definitions, NullInstrument())


def make(definitions: Mapping[str, Metric], registry: CollectorRegistry) -> dict[str, AnyInstrument]:
    """Returns an instrument for each definition, by the same key, registered with ``registry``."""
    return {key: _make(metric, registry) for key, metric in definitions.items()}


def _make(metric: Metric, registry: CollectorRegistry) -> Instrument:
    more = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
    return _KINDS[metric.kind](metric.full_name, metric.help, metric.labels, registry=registry, **more)


class VllmNames(Collector):
    """Shows instruments that have a vLLM name in their definition a second time, under that name."""

    def __init__(self, definitions: Mapping[str, Metric], made: Mapping[str, AnyInstrument]) -> None:
        self._named = [(metric, made[key]) for key, metric in definitions.items() if metric.vllm or metric.vllm_by]

    def describe(self) -> Iterable[Family]:
        """Returns no metric family, so that the registry doesn't check names in advance."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yields the metric families under vLLM's names; where vLLM has a metric per label value, a family for
        each.
        """
        for metric, instrument in self._named:
            for family in instrument.collect():
                if metric.vllm:
                    yield _renamed(family, VLLM_PREFIX + metric.vllm)
                for value, name in metric.vllm_by:
                    yield _renamed(family, VLLM_PREFIX + name, metric.labels[-1], value)


def _renamed(family: Family, name: str, label: str = "", value: str = "") -> Family:
    """Returns the samples renamed; with ``label``, only those that have ``value`` there, and without it."""
    other = Family(name, family.documentation, family.type)
    other.samples = [
        Sample(name + s.name.removeprefix(family.name), _labels(s.labels, label), s.value, s.timestamp, s.exemplar)
        for s in family.samples
        if not label or s.labels[label] == value
    ]
    return other


def _labels(labels: Mapping[str, str], without: str = "") -> dict[str, str]:
    return {VLLM_LABELS.get(key, key): value for key, value in labels.items() if key != without}
