"""Live figures of this router: the last minute by context class, and the last requests, for snapshots of the
cluster.

Knows nothing of HTTP or workers. Everything is bounded: seconds are counted in bins of 5% width, in slots of a few
seconds that are dropped when they are old; several router processes' states add up (``merged``).

Tallies.fold ──ClassWindow──> slot of its class ──state()──> merged([…]) ──> percentiles, goodput, attainment
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec

SLOT_S = 5.0  # seconds counted together
SLOTS = 12  # slots that are kept: a minute
KEPT_REQUESTS = 48  # last requests that a look shows
LEAST_S = 1e-5  # seconds of the first bin's beginning
_PER_BIN = math.log(1.05)
QUANTILES = (50, 95, 99)  # percentiles that are shown
GOOD_ENDS = ("stop", "length", "tool_calls")
SloVerdict = str  # "met", "missed", "unjudged", or "" where no SLO was asked for


class ChoiceOutcome(msgspec.Struct, frozen=True, gc=False):
    """Describes one choice that has ended, as its client saw it.

    ``at`` is when it ended, Unix seconds; durations are seconds from the request's arrival.
    """

    at: float
    request_id: str
    model: str
    context_class: str
    outcome: str  # finish_reason, an error label, or "cancelled"
    way: str  # "local" (the decode worker prefilled) or "prefill"
    prefill: str  # worker id, "" for none
    decode: str  # worker id, "" for none
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    duration_s: float
    ttft_s: float | None
    tpot_s: float | None  # mean seconds per output token after the first
    longest_gap_s: float
    stations: dict[str, float]  # seconds by station: queue, prefill, transfer, …
    slo_ttft_s: float  # 0: none
    slo_tpot_s: float  # 0: none
    verdict: SloVerdict
    adapter: str = ""
    accepted_drafts: int = 0
    rejected_drafts: int = 0


Bins = dict[int, int]


class ClassWindow(msgspec.Struct):
    """Counts one context class over some seconds: ``counts`` by name, ``bins`` by name of what was timed."""

    counts: dict[str, int] = msgspec.field(default_factory=dict)
    bins: dict[str, Bins] = msgspec.field(default_factory=dict)

    def add(self, other: ClassWindow) -> None:
        """Adds another window's counts and bins to this one's."""
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for name, bins in other.bins.items():
            mine = self.bins.get(name)
            if mine is None:
                self.bins[name] = bins.copy()
                continue
            for at, count in bins.items():
                mine[at] = mine.get(at, 0) + count


class LiveState(msgspec.Struct):
    """Holds one process's live figures; ``seconds`` is the time that they cover, ``waiting`` the queued requests by
    context class.
    """

    seconds: float
    classes: dict[str, ClassWindow]
    recent: list[ChoiceOutcome]
    waiting: dict[str, int] = {}


class LiveStats:
    """Keeps the last minute's figures by context class.

    ``clock`` gives monotonic seconds. ``before_a_look`` is called before a state is read, to add what is buffered
    elsewhere.
    """

    def __init__(self, clock: Callable[[], float], before_a_look: Callable[[], object] = lambda: None) -> None:
        self._clock, self._before_a_look = clock, before_a_look
        self._started = clock()
        self._slots: dict[int, dict[str, ClassWindow]] = {}
        self._summed: tuple[int, dict[str, ClassWindow]] = (-1, {})  # a slot, and all that are older
        self.recent: deque[ChoiceOutcome] = deque(maxlen=KEPT_REQUESTS)

    def slot(self) -> int:
        """Returns the number of the current slot, SLOT_S long."""
        return int(self._clock() / SLOT_S)

    def add(self, slot: int, context_class: str, window: ClassWindow) -> None:
        """Adds a window of a class to a slot, the current one or one just past."""
        if slot < self._summed[0]:
            self._summed = (-1, {})
        self._window(slot, context_class).add(window)

    def refused(self, context_class: str, missed: int) -> None:
        """Counts a request that was refused on opening; ``missed`` of its choices had an SLO."""
        counts = {"refused": 1, "missed": missed} if missed else {"refused": 1}
        self.add(self.slot(), context_class, ClassWindow(counts))

    def state(self, waiting: dict[str, int]) -> LiveState:
        """Returns the sum of the slots of the last minute; ``waiting`` is passed through."""
        self._before_a_look()
        newest = self.slot()
        if self._summed[0] != newest:  # once per slot: a look is taken each second
            self._summed = (newest, _sum(self._slots[n] for n in self._slots if newest - SLOTS < n < newest))
        classes = _sum([self._summed[1], self._slots.get(newest, {})])
        now = self._clock()
        covered = (SLOTS - 1) * SLOT_S + now % SLOT_S
        return LiveState(max(1.0, min(covered, now - self._started)), classes, list(self.recent), waiting)

    def _window(self, number: int, context_class: str) -> ClassWindow:
        slot = self._slots.get(number)
        if slot is None:
            for old in [n for n in self._slots if n <= number - SLOTS]:
                del self._slots[old]
            slot = self._slots[number] = {}
        window = slot.get(context_class)
        if window is None:
            window = slot[context_class] = ClassWindow()
        return window


def _sum(slots: Iterable[dict[str, ClassWindow]]) -> dict[str, ClassWindow]:
    classes: dict[str, ClassWindow] = {}
    for slot in slots:
        for name, window in slot.items():
            classes.setdefault(name, ClassWindow()).add(window)
    return classes


def bin_of(seconds: float) -> int:
    """Returns the number of the bin that ``seconds`` belongs to; each bin is 5% wide."""
    return int(math.log(max(seconds, LEAST_S) / LEAST_S) / _PER_BIN)


def bin_start(at: int) -> float:
    """Returns the least seconds that belong to bin ``at``."""
    return LEAST_S * math.exp(at * _PER_BIN)


def verdict(
    ttft_s: float | None, tpot_s: float | None, slo_ttft_s: float, slo_tpot_s: float, ok: bool
) -> SloVerdict:
    """Judges one answer by its SLOs (0: none): "met", "missed", "unjudged" for one token under a TPOT SLO, ""
    without SLOs.

    An answer that failed (``ok`` False) missed.
    """
    if not slo_ttft_s and not slo_tpot_s:
        return ""
    late = slo_ttft_s and (ttft_s is None or ttft_s > slo_ttft_s)
    slow = slo_tpot_s and tpot_s is not None and tpot_s > slo_tpot_s
    if not ok or late or slow:
        return "missed"
    return "unjudged" if slo_tpot_s and tpot_s is None else "met"


def merged(states: Iterable[LiveState]) -> LiveState:
    """Returns the sum of several processes' states."""
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
    """Returns {"p50", "p95", "p99"} in seconds, accurate to 2.5%; None if ``bins`` is empty."""
    total = sum(bins.values())
    if not total:
        return None
    found, reached, wanted = {}, 0, [(q, q / 100 * total) for q in QUANTILES]
    for at in sorted(bins):
        reached += bins[at]
        while wanted and reached >= wanted[0][1]:
            found[f"p{wanted.pop(0)[0]}"] = LEAST_S * math.exp((at + 0.5) * _PER_BIN)
    return found
