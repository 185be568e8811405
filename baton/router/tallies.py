"""What choices count, by model and context class: taken down as it comes, and folded into the metrics and the live
figures when somebody looks at them, with every new slot of the live figures, and after ``MOST`` choices.

Knows nothing of how a choice is measured. To fold many costs a tenth of telling each to a dozen instruments.

    Meter ──append──> Tally ──fold──> RouterMetrics (before a scrape), LiveStats (before a look)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from time import monotonic
from typing import Any, Protocol

from baton.cluster.metrics import SECONDS, TOKENS
from baton.cluster.telemetry import RouterMetrics, exemplar
from baton.router.gaps import Gaps, cells_of, sort_into
from baton.router.live import GOOD_ENDS, SLOT_S, Bins, ClassWindow, Ended, LiveStats, verdict

MOST = 256  # choices that wait; they are folded in less than a millisecond
OWN = {"e2e": "duration", "tpot": "tpot", "longest_gap": "longest_gap"}  # not stations: they have instruments
_bucket, _length_bucket = partial(bisect_left, SECONDS), partial(bisect_left, TOKENS)


class Measured(Protocol):
    """A choice that is over; router.metering.Meter is one."""

    @property
    def counts_prompt(self) -> bool:
        """Whether its prompt's tokens are its to count."""

    @property
    def trace_id(self) -> str:
        """Empty where its trace is not kept."""

    def over(self) -> Ended:
        """What became of it."""


class Tally:
    """One model and class since the last fold."""

    __slots__ = ("firsts", "gaps", "labels", "over")

    def __init__(self, model: str, context_class: str) -> None:
        self.labels = (model, context_class)
        self.gaps = Gaps()
        self.firsts: list[float] = []  # seconds to first tokens
        self.over: list[Measured] = []


class Tallies:
    """All of them. What comes before ``due``, on ``clock``, belongs to one slot of ``live``: then call ``fold``."""

    def __init__(
        self, metrics: RouterMetrics, live: LiveStats | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self.metrics, self.live = metrics, live
        self._clock = clock
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._waiting = 0
        self._slot = 0
        self.due = 0.0
        metrics.asked.before(self.fold)
        if live is not None:
            live.before_a_look = metrics.asked.now

    def of(self, model: str, context_class: str) -> Tally:
        """Where to take it down."""
        found = self._tallies.get((model, context_class))
        if found is None:
            found = self._tallies[model, context_class] = Tally(model, context_class)
        return found

    def first(self, tally: Tally, seconds: float, trace_id: str) -> None:
        """A choice's first token came."""
        if trace_id:
            self.metrics.ttft.labels(*tally.labels).observe(seconds, exemplar(trace_id))
        else:
            tally.firsts.append(seconds)

    def ended(self, tally: Tally, measured: Measured) -> None:
        """A choice is over. What it has to say is asked for when it is folded."""
        if self._waiting >= MOST:
            self.fold()
        self._waiting += 1
        tally.over.append(measured)

    def fold(self) -> None:
        """Hand over what was taken down."""
        over = [one for tally in self._tallies.values() for one in self._fold(tally)]
        if self.live is not None:
            self.live.recent.extend(sorted(over, key=attrgetter("at")))
        self._waiting = 0
        self._slot = int(self._clock() / SLOT_S)
        self.due = (self._slot + 1) * SLOT_S

    def _fold(self, tally: Tally) -> list[Ended]:
        window = ClassWindow()
        self._count_tokens(tally, window)
        measured, tally.over = tally.over, []
        over = [one.over() for one in measured]
        if over:
            both = list(zip(measured, over, strict=True))
            window.counts = counts_of(over)
            self._count_ends(tally, over)
            self._count_prompts(tally, [end for one, end in both if one.counts_prompt])
            self._count_times(tally, over, window.bins)
            self._lead_to(tally, [(end, one.trace_id) for one, end in both if one.trace_id])
        if self.live is not None and (window.counts or window.bins):
            self.live.add(self._slot, tally.labels[1], window)
        return over

    def _count_tokens(self, tally: Tally, window: ClassWindow) -> None:
        """First ones, and the gaps between the others."""
        firsts, tally.firsts = tally.firsts, []
        if firsts:
            self.metrics.ttft.labels(*tally.labels).observe_many(Counter(map(_bucket, firsts)), sum(firsts))
        bins: Bins = {}
        gaps, seconds = tally.gaps.drain(bins)
        if gaps:
            window.bins["itl"] = bins
            self.metrics.itl.labels(*tally.labels).observe_many(gaps, seconds)

    def _count_ends(self, tally: Tally, over: Sequence[Ended]) -> None:
        metrics, labels = self.metrics, tally.labels
        for outcome, count in Counter(map(attrgetter("outcome"), over)).items():
            metrics.requests.labels(*labels, outcome).inc(count)
        for (slo, found), count in Counter(judged(over)).items():
            metrics.slo.labels(*labels, slo, found).inc(count)
        _count_lengths(metrics.output_tokens, metrics.output_length, labels, [e.output_tokens for e in over])

    def _count_prompts(self, tally: Tally, prompts: Sequence[Ended]) -> None:
        metrics, labels = self.metrics, tally.labels
        if prompts:
            _count_lengths(metrics.prompt_tokens, metrics.prompt_length, labels, [e.prompt_tokens for e in prompts])
            metrics.cached_tokens.labels(*labels).inc(sum(e.cached_tokens for e in prompts))

    def _count_times(self, tally: Tally, over: Sequence[Ended], bins: dict[str, Bins]) -> None:
        for name, seconds in times_of(over).items():
            buckets = sort_into(cells_of(seconds), bins.setdefault(name, {}))
            if name != "ttft":  # counted with its token
                self._histogram(tally, name).observe_many(buckets, sum(seconds))

    def _lead_to(self, tally: Tally, traced: Sequence[tuple[Ended, str]]) -> None:
        """Traces that are kept, as the exemplars of their buckets."""
        for one, trace_id in traced:
            for name, (value,) in times_of([one]).items():
                if name != "ttft":
                    self._histogram(tally, name).exemplify(value, exemplar(trace_id), one.at)

    def _histogram(self, tally: Tally, name: str) -> Any:
        if name in OWN:
            return getattr(self.metrics, OWN[name]).labels(*tally.labels)
        return self.metrics.station.labels(*tally.labels, name)


def counts_of(over: Sequence[Ended]) -> dict[str, int]:
    """What the live figures count of choices that ended."""
    found = {
        "ended": len(over),
        "in": sum(e.prompt_tokens for e in over),
        "cached": sum(e.cached_tokens for e in over),
        "out": sum(e.output_tokens for e in over),
    }
    found |= {name: count for name, count in Counter(map(attrgetter("verdict"), over)).items() if name}
    for outcome, count in Counter(map(attrgetter("outcome"), over)).items():
        if outcome not in (*GOOD_ENDS, "cancelled"):
            name = "refused" if outcome == "overloaded" else "failed"
            found[name] = found.get(name, 0) + count
    return found


def times_of(over: Sequence[Ended]) -> dict[str, list[float]]:
    """Their seconds by name: stations, and what a client saw. One token has no TPOT and no gap."""
    found: dict[str, list[float]] = {}
    for one in over:
        for name, seconds in one.stations.items():
            if name in found:
                found[name].append(seconds)
            else:
                found[name] = [seconds]
    found["e2e"] = [e.duration_s for e in over]
    found["ttft"] = [e.ttft_s for e in over if e.ttft_s is not None]  # the router's own is not from arrival
    found["tpot"] = [e.tpot_s for e in over if e.tpot_s is not None]
    found["longest_gap"] = [e.longest_gap_s for e in over if e.tpot_s is not None]
    return {name: seconds for name, seconds in found.items() if seconds}


def judged(over: Sequence[Ended]) -> Iterator[tuple[str, str]]:
    """Each SLO that was asked for, with its verdict."""
    for one in over:
        if one.verdict:
            judge = partial(verdict, one.ttft_s, one.tpot_s, ok=one.outcome in GOOD_ENDS)
            each = {"ttft": judge(one.slo_ttft_s, 0.0), "tpot": judge(0.0, one.slo_tpot_s), "all": one.verdict}
            yield from ((slo, found) for slo, found in each.items() if found)


def _count_lengths(counter: Any, histogram: Any, labels: tuple[str, str], lengths: Sequence[int]) -> None:
    total = sum(lengths)
    counter.labels(*labels).inc(total)
    histogram.labels(*labels).observe_many(Counter(map(_length_bucket, lengths)), total)
