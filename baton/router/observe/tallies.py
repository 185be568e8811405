"""Buffers of what ended choices count, by model and context class, added in batches to the metrics and the live
figures.

Knows nothing of how a choice is measured. They are folded when somebody reads the figures, with every new slot of
the live figures, and after ``MOST`` choices; that costs a tenth of telling each choice to a dozen instruments.

Meter ──append──> Tally ──fold──> RouterMetrics (before a scrape), LiveStats (before a look)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from time import monotonic, time

from prometheus_client import Counter as PrometheusCounter

from baton.cluster.metering.instruments import ManyHistogram
from baton.cluster.metering.metrics import SECONDS, TOKENS
from baton.cluster.metering.telemetry import RouterMetrics, exemplar
from baton.router.observe.gaps import Gaps, cells_of, sort_into
from baton.router.observe.live import (
    GOOD_ENDS,
    KEPT_REQUESTS,
    SLOT_S,
    Bins,
    ChoiceOutcome,
    ClassWindow,
    LiveStats,
    verdict,
)
from baton.router.observe.recorder import TraceRecorder
from baton.router.observe.reuse import UnboundedCache
from baton.router.request.request import RouterRequest

MOST = 256  # choices that wait; they are folded in less than a millisecond
_bucket, _length_bucket = partial(bisect_left, SECONDS), partial(bisect_left, TOKENS)


class ClassTally:
    """Buffers the choices of one model and context class since the last fold."""

    __slots__ = ("chains", "firsts", "gaps", "labels", "model", "over", "prompts", "requests", "traced")

    def __init__(self, model: str, context_class: str) -> None:
        self.model, self.labels = model, (model, context_class)
        self.gaps = Gaps()
        self.firsts: list[float] = []  # seconds to first tokens
        self.over: list[ChoiceOutcome] = []
        self.requests: list[str] = []  # outcomes of requests, each of whose last choice has ended
        self.prompts: list[ChoiceOutcome] = []  # of these, who count their prompt's tokens
        self.chains: list[bytes] = []  # and its blocks
        self.traced: list[tuple[ChoiceOutcome, str]] = []  # and who lead to a trace


class Tallies:
    """Keeps the tallies of all models and context classes.

    ``clock`` is monotonic, ``wall_clock`` Unix time, both in seconds. ``recorder``: meters record a trace of
    answers there.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
        live: LiveStats | None = None,
        clock: Callable[[], float] = monotonic,
        wall_clock: Callable[[], float] = time,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.metrics, self.live, self.wall_clock, self.recorder = metrics, live, wall_clock, recorder
        self._clock = clock
        # Times that are no stations: they have instruments of their own.
        self._own = {"e2e": metrics.duration, "tpot": metrics.tpot, "longest_gap": metrics.longest_gap}
        self._tallies: dict[tuple[str, str], ClassTally] = {}
        self._endless = UnboundedCache()
        self._waiting = 0
        self._slot = 0
        self._due = 0.0
        metrics.asked.before(self.fold)

    def now(self) -> float:
        """Returns the time of ``clock``, after folding if a new slot of the live figures has begun."""
        now = self._clock()
        if now >= self._due:
            self.fold()
        return now

    def of(self, model: str, context_class: str) -> ClassTally:
        """Returns the tally of a model and context class."""
        found = self._tallies.get((model, context_class))
        if found is None:
            found = self._tallies[model, context_class] = ClassTally(model, context_class)
        return found

    def first(self, tally: ClassTally, seconds: float, trace_id: str) -> None:
        """Counts a choice's first token, ``seconds`` after its request arrived."""
        if trace_id:
            self.metrics.ttft.labels(*tally.labels).observe(seconds, exemplar(trace_id))
        else:
            tally.firsts.append(seconds)

    def ended(self, tally: ClassTally, over: ChoiceOutcome, chain: bytes | None, trace_id: str = "") -> None:
        """Counts a choice that has ended.

        ``chain``: the prompt's block hashes as far as they are known; None if another choice counts the prompt.
        """
        tally.over.append(over)
        if chain is not None:
            tally.prompts.append(over)
            tally.chains.append(chain)
        if trace_id:
            tally.traced.append((over, trace_id))
        self._waiting += 1
        if self._waiting >= MOST:
            self.fold()

    def fold(self) -> None:
        """Adds everything buffered to the metrics and the live figures."""
        latest = [one for tally in self._tallies.values() for one in self._fold(tally)[-KEPT_REQUESTS:]]
        if self.live is not None:
            self.live.recent.extend(sorted(latest, key=attrgetter("at")))
        self._waiting = 0
        self._slot = int(self._clock() / SLOT_S)
        self._due = (self._slot + 1) * SLOT_S

    def _fold(self, tally: ClassTally) -> list[ChoiceOutcome]:
        window, over = ClassWindow(), tally.over
        self._count_tokens(tally, window)
        if over:
            tally.over = []
            window.counts = counts_of(over, tally.requests, tally.prompts)
            self._count_ends(tally, over)
            self._count_prompts(tally, window.counts)
            self._count_times(tally, over, window.bins)
            self._lead_to(tally)
        if self.live is not None and (window.counts or window.bins):
            self.live.add(self._slot, tally.labels[1], window)
        return over

    def _count_tokens(self, tally: ClassTally, window: ClassWindow) -> None:
        """First ones, and the gaps between the others."""
        firsts, tally.firsts = tally.firsts, []
        if firsts:
            self.metrics.ttft.labels(*tally.labels).observe_many(Counter(map(_bucket, firsts)), sum(firsts))
        bins: Bins = {}
        gaps, seconds = tally.gaps.drain(bins)
        if gaps:
            window.bins["itl"] = bins
            self.metrics.itl.labels(*tally.labels).observe_many(gaps, seconds)

    def _count_ends(self, tally: ClassTally, over: Sequence[ChoiceOutcome]) -> None:
        metrics, labels = self.metrics, tally.labels
        requests, tally.requests = tally.requests, []
        for outcome, count in Counter(requests).items():
            metrics.requests.labels(*labels, outcome).inc(count)
        for (slo, found), count in Counter(judged(over)).items():
            metrics.slo.labels(*labels, slo, found).inc(count)
        _count_lengths(metrics.output_tokens, metrics.output_length, labels, [e.output_tokens for e in over])
        for outcome in ("accepted", "rejected"):
            if tokens := sum(map(attrgetter(f"{outcome}_drafts"), over)):
                metrics.prediction_tokens.labels(*labels, outcome).inc(tokens)

    def _count_prompts(self, tally: ClassTally, counts: dict[str, int]) -> None:
        """Counts prompts, and what an endless cache would have held of them."""
        metrics, labels, prompts, chains = self.metrics, tally.labels, tally.prompts, tally.chains
        if not prompts:
            return
        tally.prompts, tally.chains = [], []
        lengths = [e.prompt_tokens for e in prompts]
        _count_lengths(metrics.prompt_tokens, metrics.prompt_length, labels, lengths)
        metrics.cached_tokens.labels(*labels).inc(sum(e.cached_tokens for e in prompts))
        best = sum(map(self._endless.could_reuse, chains, lengths))
        metrics.best_cached_tokens.labels(*labels).inc(best)
        if best:
            counts["best"] = best

    def _count_times(self, tally: ClassTally, over: Sequence[ChoiceOutcome], bins: dict[str, Bins]) -> None:
        for name, seconds in times_of(over).items():
            buckets = sort_into(cells_of(seconds), bins.setdefault(name, {}))
            if name != "ttft":  # counted with its token
                self._histogram(tally, name).observe_many(buckets, sum(seconds))

    def _lead_to(self, tally: ClassTally) -> None:
        """Traces that are kept, as the exemplars of their buckets."""
        traced, tally.traced = tally.traced, []
        for one, trace_id in traced:
            for name, (value,) in times_of([one]).items():
                if name != "ttft":
                    self._histogram(tally, name).exemplify(value, exemplar(trace_id), one.at)

    def _histogram(self, tally: ClassTally, name: str) -> ManyHistogram:
        own = self._own.get(name)
        if own is not None:
            return own.labels(*tally.labels)
        return self.metrics.station.labels(*tally.labels, name)


def counts_of(
    over: Sequence[ChoiceOutcome], requests: Sequence[str], prompts: Sequence[ChoiceOutcome]
) -> dict[str, int]:
    """Returns the live figures' counts by name: "ended", "refused" and "failed" are requests, "in" and "cached" the
    tokens of their prompts, the others of the choices ``over``.

    ``requests`` are the outcomes of requests that ended, each once whatever its n; ``prompts`` are the choices that
    count their prompt's tokens.
    """
    found = {
        "ended": len(requests),
        "in": sum(e.prompt_tokens for e in prompts),
        "cached": sum(e.cached_tokens for e in prompts),
        "out": sum(e.output_tokens for e in over),
    }
    found |= {name: count for name, count in Counter(map(attrgetter("verdict"), over)).items() if name}
    for outcome, count in Counter(requests).items():
        if outcome not in (*GOOD_ENDS, "cancelled"):
            name = "refused" if outcome == "overloaded" else "failed"
            found[name] = found.get(name, 0) + count
    return found


def times_of(over: Sequence[ChoiceOutcome]) -> dict[str, list[float]]:
    """Returns the choices' seconds by name: stations, ttft, tpot, e2e and longest_gap; names without any value are
    left out.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for one in over:
        for name, seconds in one.stations.items():
            found[name].append(seconds)
    found["e2e"] = [e.duration_s for e in over]
    found["ttft"] = [e.ttft_s for e in over if e.ttft_s is not None]  # the router's own is not from arrival
    found["tpot"] = [e.tpot_s for e in over if e.tpot_s is not None]
    found["longest_gap"] = [e.longest_gap_s for e in over if e.tpot_s is not None]
    return {name: seconds for name, seconds in found.items() if seconds}


def judged(over: Sequence[ChoiceOutcome]) -> Iterator[tuple[str, str]]:
    """Yields (SLO, verdict) for each choice and each SLO ("ttft", "tpot", "all") that was asked for."""
    for one in over:
        if one.verdict:
            judge = partial(verdict, one.ttft_s, one.tpot_s, ok=one.outcome in GOOD_ENDS)
            each = {"ttft": judge(one.slo_ttft_s, 0.0), "tpot": judge(0.0, one.slo_tpot_s), "all": one.verdict}
            yield from ((slo, found) for slo, found in each.items() if found)


def _count_lengths(
    counter: PrometheusCounter, histogram: ManyHistogram, labels: tuple[str, str], lengths: Sequence[int]
) -> None:
    total = sum(lengths)
    counter.labels(*labels).inc(total)
    histogram.labels(*labels).observe_many(Counter(map(_length_bucket, lengths)), total)


def count_refusal(
    metrics: RouterMetrics, live: LiveStats | None, request: RouterRequest, context_class: str
) -> None:
    """Counts a request that was refused on opening: each of its choices missed every SLO that was asked for."""
    context = request.context
    asked = {"ttft": context.slo_ttft_s, "tpot": context.slo_tpot_s, "all": context.has_slo}
    for slo in (slo for slo, wanted in asked.items() if wanted):
        metrics.slo.labels(request.model_id, context_class, slo, "missed").inc(request.n)
    if live is not None:
        live.refused(context_class, request.n if context.has_slo else 0)
