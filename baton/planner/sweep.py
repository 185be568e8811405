"""A sweep simulates every ratio of a number of workers over the same trace, and finds the plateau, its cliffs and
confidence intervals.

Knows nothing of prices, consoles or plots. A ratio is (prefill, decode); (0, n) is colocated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from baton.planner.processes import each
from baton.planner.score import Score, Slo, is_good, score, span
from baton.planner.simulator.cluster import ClusterScenario, ClusterSim
from baton.planner.simulator.flight import Flight
from baton.protos.errors import ConfigError

PLATEAU = 0.02  # share of the best ratio's good requests that a ratio on its plateau may have fewer
ALIKE = 0.01  # share by which numbers of good requests may differ and count as alike
FULL = 0.85  # beyond it, somebody waits
RESAMPLES = 400  # bootstrap resamples
WORTH_PROCESSES = 2_000  # requests simulated in all from which on processes pay: one takes half a second to start
INTERVAL = (0.05, 0.95)  # shares of the resamples that bound a ratio's interval: 90 of 100 lie within


def ratio_name(prefill: int, decode: int) -> str:
    """Returns the ratio's name, as in "3P1D" or "4 colocated"."""
    return f"{prefill}P{decode}D" if prefill else f"{decode} colocated"


class RatioOutcome(msgspec.Struct, frozen=True):
    """Holds one ratio's simulated outcome, as means over its workers.

    ``prefill_busy`` and ``decode_busy`` are shares of the time in steps (for decode workers this says nothing of
    free room); ``decode_pages`` and ``decode_seats`` are the shares that arrivals found taken. ``moved`` counts
    answers, ``read_again`` prompts, that a worker's death sent elsewhere.
    """

    prefill: int
    decode: int
    score: Score
    prefill_busy: float
    decode_busy: float
    preemptions: int
    hit_rate: float
    decode_pages: float = 0.0
    decode_seats: float = 0.0
    deaths: int = 0
    moved: int = 0
    read_again: int = 0

    @property
    def name(self) -> str:
        """Returns the ratio's name, as in "3P1D"."""
        return ratio_name(self.prefill, self.decode)


class Cliff(msgspec.Struct, frozen=True):
    """Describes the first ratio beside the plateau: on which side ("few prefill", "few decode"), its goodput, the
    share ``lost`` of good requests, and why.
    """

    side: str
    prefill: int
    decode: int
    goodput: float
    lost: float
    reason: str


class Sweep(msgspec.Struct, frozen=True):
    """Holds a sweep's results, ``ratios`` from few to many prefill workers.

    ``plateau`` and ``interval`` are ranges of prefill workers: those nearly as good as the best, and the 90%
    confidence interval of the best. ``goodput_interval`` is the best one's, in requests/s.
    """

    ratios: tuple[RatioOutcome, ...]
    colocated: RatioOutcome
    best: RatioOutcome
    plateau: tuple[int, int]
    cliffs: tuple[Cliff, ...]
    interval: tuple[int, int]
    goodput_interval: tuple[float, float]


Flights = dict[tuple[int, int], list[Flight]]


def simulate(scenario: ClusterScenario, slo: Slo) -> RatioOutcome:
    """Returns the simulated outcome of the scenario's ratio over its trace."""
    return _run(scenario, slo)[0]


def _run(scenario: ClusterScenario, slo: Slo) -> tuple[RatioOutcome, list[Flight]]:
    sim = ClusterSim(scenario)
    sim.run()
    lasted = max(span(sim.flights), 1e-9)
    readers = [p.node for p in sim.prefills.values()]
    writers = [d.node for d in sim.decodes.values()]
    asked = sum(f.prompt for f in sim.flights if not f.refused)
    found = RatioOutcome(
        len(sim.prefills),
        len(sim.decodes),
        score(sim.flights, slo, lasted),
        sum(n.busy for n in readers) / lasted / max(1, len(readers)),
        sum(n.busy for n in writers) / lasted / len(writers),
        sum(n.preemptions for n in writers),
        sum(f.cached for f in sim.flights if not f.refused) / max(1, asked),
        sum(sim.pages_leased) / max(1, len(sim.pages_leased)),
        sum(sim.seats_taken) / max(1, len(sim.seats_taken)),
        sim.faults.deaths,
        sim.faults.moved,
        sim.faults.read_again,
    )
    return found, sim.flights


def sweep(
    workers: int,
    scenario: ClusterScenario,
    slo: Slo,
    window_s: float = 60.0,
    told: Callable[[RatioOutcome], None] = lambda ratio: None,
    processes: int = 1,
) -> tuple[Sweep, Flights]:
    """Returns the sweep over 1P(n-1)D to (n-1)P1D and n colocated, and every ratio's simulated requests.

    Confidence comes from resampling windows of ``window_s`` seconds; ``told`` is called with each outcome, in
    order. Ratios are simulated in up to ``processes`` processes. Raises ConfigError for fewer than 2 workers.
    """
    if workers < 2:
        raise ConfigError("a ratio needs two workers at least", "workers")
    ratios: list[RatioOutcome] = []
    flights: Flights = {}
    if workers * len(scenario.trace.requests) < WORTH_PROCESSES:
        processes = 1
    for found, served in each(partial(_at_readers, scenario, slo, workers), range(workers), processes):
        flights[found.prefill, found.decode] = served
        told(found)
        ratios.append(found)
    colocated, split = ratios[0], tuple(ratios[1:])
    best = best_of(split)
    rng = random.Random(scenario.settings.seed)
    interval, goodputs = _bootstrap(split, flights, best, slo, window_s, rng)
    plateau = plateau_of(split, best)
    cliffs = tuple(_cliffs(split, plateau, best))
    return Sweep(split, colocated, best, plateau, cliffs, interval, goodputs), flights


def _at_readers(
    scenario: ClusterScenario, slo: Slo, workers: int, readers: int
) -> tuple[RatioOutcome, list[Flight]]:
    """Returns the outcome with ``readers`` of the workers reading prompts, and its ended flights."""
    found, served = _run(at_ratio(scenario, readers, workers - readers), slo)
    return found, [flight.ended() for flight in served]


def at_ratio(scenario: ClusterScenario, prefill: int, decode: int) -> ClusterScenario:
    """Returns the scenario with ``prefill`` and ``decode`` workers."""
    settings = msgspec.structs.replace(scenario.settings, prefill=prefill, decode=decode)
    return msgspec.structs.replace(scenario, settings=settings)


def best_of(ratios: Sequence[RatioOutcome]) -> RatioOutcome:
    """Returns, among the ratios within ALIKE of the most good requests, the one with the lowest mean latency.

    Ratios served the same requests, so their good ones are counted: one slow answer at the end of a run changes
    its goodput, but not how well the others were served.
    """
    most = max(r.score.good for r in ratios)
    alike = [r for r in ratios if r.score.good >= (1 - ALIKE) * most]
    return min(alike, key=lambda r: r.score.latency.mean)


def plateau_of(ratios: Sequence[RatioOutcome], best: RatioOutcome) -> tuple[int, int]:
    """Returns the fewest and most prefill workers of the ratios around ``best``, without a gap, that have at
    most PLATEAU (a share) fewer good requests.
    """
    good = {r.prefill for r in ratios if r.score.good >= (1 - PLATEAU) * best.score.good}
    low = high = best.prefill
    while low - 1 in good:
        low -= 1
    while high + 1 in good:
        high += 1
    return low, high


def _cliffs(ratios: Sequence[RatioOutcome], plateau: tuple[int, int], best: RatioOutcome) -> list[Cliff]:
    by_prefill = {r.prefill: r for r in ratios}
    found = []
    for side, beyond in (("few prefill", plateau[0] - 1), ("few decode", plateau[1] + 1)):
        over = by_prefill.get(beyond)
        if over is not None:
            lost = 1 - over.score.good / best.score.good if best.score.good else 0.0
            found.append(Cliff(side, over.prefill, over.decode, over.score.goodput, lost, miss_reason(over)))
    return found


def miss_reason(ratio: RatioOutcome) -> str:
    """Returns, in words, why a ratio misses SLOs."""
    s = ratio.score
    parts = []
    if s.late_first:
        parts.append(f"{s.late_first:.1%} get their first token late ({_held_up(ratio)})")
    if s.late_tokens:
        parts.append(
            f"{s.late_tokens:.1%} get tokens too slowly (decode in steps {ratio.decode_busy:.0%} of the time)"
        )
    if s.refused:
        parts.append(f"{s.refused / s.requests:.1%} don't fit a worker's KV pages")
    if ratio.preemptions:
        parts.append(f"{ratio.preemptions} preemptions for want of KV pages")
    return "; ".join(parts) or "every SLO is met"


def _held_up(ratio: RatioOutcome) -> str:
    """Returns in words what a late first token waits for."""
    if max(ratio.decode_pages, ratio.decode_seats) > FULL and ratio.prefill_busy < FULL:
        pages, seats = f"{ratio.decode_pages:.0%} of decode pages", f"{ratio.decode_seats:.0%} of decode seats"
        reading = f", prefill busy {ratio.prefill_busy:.0%}" if ratio.prefill else ""
        return f"waiting for a decode worker: {pages} and {seats} are taken{reading}"
    if not ratio.prefill:
        return f"workers in steps {ratio.decode_busy:.0%} of the time"
    return f"prefill busy {ratio.prefill_busy:.0%}"


def _bootstrap(
    ratios: Sequence[RatioOutcome],
    flights: Flights,
    best: RatioOutcome,
    slo: Slo,
    window_s: float,
    rng: random.Random,
) -> tuple[tuple[int, int], tuple[float, float]]:
    """Windows of the trace drawn again and again: which ratio would have been best, and how good the best one."""
    seen = {r.prefill: _by_window(flights[r.prefill, r.decode], slo, window_s) for r in ratios}
    windows = len(seen[best.prefill])  # every ratio served the same requests
    lasted = max(span(flights[best.prefill, best.decode]), 1e-9)
    winners, goodputs = [], []
    for _ in range(RESAMPLES):
        drawn = [rng.randrange(windows) for _ in range(windows)]
        sums = {p: (sum(w[i][0] for i in drawn), sum(w[i][1] for i in drawn)) for p, w in seen.items()}
        most = max(good for good, _ in sums.values())
        winners.append(min((late, p) for p, (good, late) in sums.items() if good >= (1 - ALIKE) * most)[1])
        goodputs.append(sums[best.prefill][0] / lasted)
    low, high = _middle(sorted(winners))
    return (int(low), int(high)), _middle(sorted(goodputs))


def _by_window(flights: Sequence[Flight], slo: Slo, window_s: float) -> list[tuple[int, float]]:
    """Good requests and seconds of latency, by window of arrival; windows in which none arrives are left out."""
    found: dict[int, tuple[int, float]] = {}
    for flight in sorted(flights, key=lambda f: f.arrival):
        window = int(flight.arrival / window_s)
        good, seconds = found.get(window, (0, 0.0))
        took = 0.0 if flight.refused else flight.last_token - flight.arrival
        found[window] = good + is_good(flight, slo), seconds + took
    return list(found.values())


def _middle(ordered: Sequence[float]) -> tuple[float, float]:
    low, high = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in INTERVAL)
    return low, high
