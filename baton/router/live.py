"""What the last minute was like, and the last requests: what a snapshot of the cluster shows of this router.

Knows nothing of HTTP or workers. Everything is bounded: seconds are counted in bins of 5% width, in slots of a few
seconds that are dropped when they are old; several router processes' states add up (``merged``).

    Meter.ended ──Ended──> slot of its class ──state()──> merged([…]) ──> percentiles, goodput, attainment
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec

SLOT_S = 5.0
SLOTS = 12
KEPT_REQUESTS = 48
LEAST_S = 1e-5
_PER_BIN = math.log(1.05)
QUANTILES = (50, 95, 99)
GOOD_ENDS = ("stop", "length", "tool_calls")
Verdict = str  # "met", "missed", "unjudged", or "" where no SLO was asked for


class Ended(msgspec.Struct, frozen=True):
    """One choice that is over, as its client saw it. Seconds from arrival; ``at`` since 1970, when it ended."""

    at: float
    request_id: str
    model: str
    context_class: str
    outcome: str
    way: str
    prefill: str
    decode: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    duration_s: float
    ttft_s: float | None
    tpot_s: float | None
    longest_gap_s: float
    stations: dict[str, float]
    slo_ttft_s: float
    slo_tpot_s: float
    verdict: Verdict


Bins = dict[int, int]


class ClassWindow(msgspec.Struct):
    """One context class, over some seconds. ``counts`` by name, ``bins`` by what was timed."""

    counts: dict[str, int] = msgspec.field(default_factory=dict)
    bins: dict[str, Bins] = msgspec.field(default_factory=dict)

    def add(self, other: ClassWindow) -> None:
        """Both together."""
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for name, bins in other.bins.items():
            mine = self.bins.setdefault(name, {})
            for at, count in bins.items():
                mine[at] = mine.get(at, 0) + count


class LiveState(msgspec.Struct):
    """What one process knows; ``seconds`` is how long its windows cover."""

    seconds: float
    classes: dict[str, ClassWindow]
    recent: list[Ended]
    waiting: dict[str, int] = {}


class LiveStats:
    """The last minute by class. ``clock`` in monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._slots: deque[tuple[int, dict[str, ClassWindow]]] = deque(maxlen=SLOTS)
        self._recent: deque[Ended] = deque(maxlen=KEPT_REQUESTS)

    def ended(self, over: Ended, gaps: Bins) -> None:
        """A choice is over; ``gaps`` are its seconds between tokens, by bin."""
        self._recent.append(over)
        window = self._window(over.context_class)
        for name in _counted(over):
            window.counts[name] = window.counts.get(name, 0) + 1
        for name, tokens in (
            ("in", over.prompt_tokens),
            ("cached", over.cached_tokens),
            ("out", over.output_tokens),
        ):
            window.counts[name] = window.counts.get(name, 0) + tokens
        for name, seconds in _timed(over).items():
            bins, at = window.bins.setdefault(name, {}), bin_of(seconds)
            bins[at] = bins.get(at, 0) + 1
        window.add(ClassWindow({}, {"itl": gaps}))

    def refused(self, context_class: str, had_slo: bool) -> None:
        """One was turned away before it began."""
        self._count(context_class, ("refused", "missed") if had_slo else ("refused",))

    def could_reuse(self, context_class: str, tokens: int) -> None:
        """So many prompt tokens an endless cache would have held."""
        counts = self._window(context_class).counts
        counts["best"] = counts.get("best", 0) + tokens

    def state(self, waiting: dict[str, int]) -> LiveState:
        """Of the slots that are not too old."""
        oldest = self._slot_now() - SLOTS + 1
        classes: dict[str, ClassWindow] = {}
        for number, slot in self._slots:
            if number >= oldest:
                for name, window in slot.items():
                    classes.setdefault(name, ClassWindow()).add(window)
        now = self._clock()
        covered = (SLOTS - 1) * SLOT_S + now % SLOT_S
        return LiveState(max(1.0, min(covered, now - self._started)), classes, list(self._recent), waiting)

    def _count(self, context_class: str, names: Iterable[str]) -> None:
        counts = self._window(context_class).counts
        for name in names:
            counts[name] = counts.get(name, 0) + 1

    def _window(self, context_class: str) -> ClassWindow:
        number = self._slot_now()
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, {}))
        return self._slots[-1][1].setdefault(context_class, ClassWindow())

    def _slot_now(self) -> int:
        return int(self._clock() / SLOT_S)


def bin_of(seconds: float) -> int:
    """Its bin; each is 5% wide."""
    return int(math.log(max(seconds, LEAST_S) / LEAST_S) / _PER_BIN)


def bin_start(at: int) -> float:
    """The least seconds that belong to a bin."""
    return LEAST_S * math.exp(at * _PER_BIN)


def verdict(ttft_s: float | None, tpot_s: float | None, slo_ttft_s: float, slo_tpot_s: float, ok: bool) -> Verdict:
    """Whether every SLO was met. One token has no TPOT: it is not judged; what failed missed."""
    if not slo_ttft_s and not slo_tpot_s:
        return ""
    late = slo_ttft_s and (ttft_s is None or ttft_s > slo_ttft_s)
    slow = slo_tpot_s and tpot_s is not None and tpot_s > slo_tpot_s
    if not ok or late or slow:
        return "missed"
    return "unjudged" if slo_tpot_s and tpot_s is None else "met"


def merged(states: Iterable[LiveState]) -> LiveState:
    """Of several processes, as one."""
    total, waiting = LiveState(1.0, {}, [], {}), Counter[str]()
    for state in states:
        total.seconds = max(total.seconds, state.seconds)
        for name, window in state.classes.items():
            total.classes.setdefault(name, ClassWindow()).add(window)
        total.recent += state.recent
        waiting.update(state.waiting)
    total.recent = sorted(total.recent, key=lambda ended: -ended.at)[:KEPT_REQUESTS]
    total.waiting = dict(waiting)
    return total


def percentiles(bins: Bins) -> dict[str, float] | None:
    """p50, p95 and p99 in seconds, right to 2.5%; None when nothing was timed."""
    total = sum(bins.values())
    if not total:
        return None
    found, reached, wanted = {}, 0, [(q, q / 100 * total) for q in QUANTILES]
    for at in sorted(bins):
        reached += bins[at]
        while wanted and reached >= wanted[0][1]:
            found[f"p{wanted.pop(0)[0]}"] = LEAST_S * math.exp((at + 0.5) * _PER_BIN)
    return found


def _counted(over: Ended) -> list[str]:
    names = ["ended"]
    if over.verdict:
        names.append(over.verdict)
    if over.outcome == "overloaded":
        names.append("refused")
    elif over.outcome not in (*GOOD_ENDS, "cancelled"):
        names.append("failed")
    return names


def _timed(over: Ended) -> dict[str, float]:
    times = {"e2e": over.duration_s, "longest_gap": over.longest_gap_s} | over.stations
    times.pop("ttft", None)  # the router's own; the client's is from arrival
    if over.ttft_s is not None:
        times["ttft"] = over.ttft_s
    if over.tpot_s is not None:
        times["tpot"] = over.tpot_s
    else:
        times.pop("longest_gap")
    return times
