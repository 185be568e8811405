"""The reach of a kind of cluster, by simulation: the fewest workers that meet SLOs, and how much more load a
cluster takes.

Knows nothing of consoles. Every answer is one or two simulated runs that anybody can repeat (``baton sim``): loads
are the trace replayed faster (``--speed``), the seed is the scenario's, and the number of runs is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from baton.planner.costs.worker import WorkerCosts
from baton.planner.score import Slo, is_good, tpot, ttft
from baton.planner.simulator.cluster import ClusterScenario, ClusterSim
from baton.planner.simulator.flight import Flight
from baton.planner.sweep import RatioOutcome, at_ratio, miss_reason, simulate
from baton.planner.traces.stats import cached_tokens
from baton.planner.traces.trace import Trace

MOST_WORKERS = 256  # workers that are tried at most
MOST_LOAD = 64.0  # times the trace's rate that are tried at most
HALVINGS = 4  # between a load that is met and twice it: to 4%
BACKLOG = 2.0  # a load must last for so many TTFT SLOs: a backlog takes one to show
DECODES = 32  # sequences of the batch at which an answer's time is estimated
ALONE_GAP = 3.0  # times a request's own seconds, until the next one comes


class IdleWorkerTimes(msgspec.Struct, frozen=True):
    """Describes how requests fare one by one on an idle worker, which no number of workers improves on.

    ``attainment`` and ``refused`` are shares of the requests. ``slo``: the tightest SLOs, each at least the ones
    asked for, that enough requests meet; None if too many don't fit any worker.
    """

    attainment: float
    refused: float
    slo: Slo | None


class Headroom(msgspec.Struct, frozen=True):
    """Describes the most load that is met: ``load`` times the trace's, with its attainment.

    ``over`` is a higher load that was not met, for ``reason``; None if none was found.
    """

    load: float
    attainment: float
    over: float | None
    over_attainment: float
    reason: str


def on_idle_workers(scenario: ClusterScenario, slo: Slo, want: float) -> IdleWorkerTimes:
    """Simulates each request by itself, on one worker that does both and on one of each role; returns the better
    result.
    """
    spaced = msgspec.structs.replace(scenario.trace, requests=tuple(_spaced(scenario)))
    idle = msgspec.structs.replace(scenario, trace=spaced, failures=(), pools=())
    both = [_flights(at_ratio(idle, prefill, 1)) for prefill in (0, 1)]
    flights = max(both, key=lambda found: sum(is_good(f, slo) for f in found))
    served = [f for f in flights if not f.refused]
    good = sum(is_good(f, slo) for f in served)
    count = len(flights)
    return IdleWorkerTimes(good / count, 1 - len(served) / count, _tightest(served, count, slo, want))


def _flights(scenario: ClusterScenario) -> list[Flight]:
    sim = ClusterSim(scenario)
    sim.run()
    return sim.flights


def _spaced(scenario: ClusterScenario) -> Iterator:  # type: ignore[type-arg]
    at, costs = 0.0, scenario.decode
    for request in scenario.trace.requests:
        yield msgspec.structs.replace(request, arrival=at)
        length, chunk = request.input_length, scenario.settings.decode_chunk
        steps = math.ceil(length / chunk) * costs.step_seconds(chunk, 0.0, 0, 0.0)
        steps += costs.pair * length * length
        steps += request.output_length * costs.step_seconds(0, 0.0, 1, length + request.output_length)
        at += ALONE_GAP * steps


def _tightest(served: list[Flight], count: int, slo: Slo, want: float) -> Slo | None:
    """Both limits at the same quantile, the lowest at which enough keep both."""
    need = math.ceil(want * count)
    if need > len(served) or not served:
        return None
    firsts, others = sorted(map(ttft, served)), sorted(map(tpot, served))
    for rank in range(max(need, 1) - 1, len(served)):
        found = Slo(max(slo.ttft_s, firsts[rank]), max(slo.tpot_s, others[rank]))
        if sum(is_good(f, found) for f in served) >= need:
            return found
    return None


def least_sufficient(scenario: ClusterScenario, slo: Slo, want: float, workers: int) -> str:
    """Returns, in words, the fewest workers (at least ``workers``) that meet the SLOs, or the SLOs that can be met
    if no number suffices.
    """
    idle = on_idle_workers(scenario, slo, want)
    if idle.slo is None:
        return f"{idle.refused:.1%} of the requests fit no worker's KV pages: take one with more memory for KV"
    if idle.attainment < want:
        least = f"TTFT {idle.slo.ttft_s:.3g} s and TPOT {idle.slo.tpot_s * 1e3:.3g} ms"
        return (
            f"more workers don't help: one by one on an idle worker {idle.attainment:.1%} of requests keep them,"
            f" and the least that {want:.0%} keep there is {least}"
        )
    found = least_workers(scenario, slo, want, workers)
    if found is None:
        tried = max(MOST_WORKERS, workers)
        return f"{tried} workers are too few as well, though each request alone is in time"
    total = found.prefill + found.decode
    return f"the fewest workers that do are {total} ({found.name}: {found.score.attainment:.1%})"


def least_workers(
    scenario: ClusterScenario, slo: Slo, want: float, low: int = 1, most: int = MOST_WORKERS
) -> RatioOutcome | None:
    """Returns the best ratio of the fewest workers, from ``low`` to ``most``, whose attainment is at least
    ``want``; None if ``most`` are too few.

    Only ratios near the demand's, and colocated, are tried, at about 3 log2(most) numbers of workers.
    """
    high, best = low, best_of_about(scenario, slo, low)
    while best.score.attainment < want:
        if high >= most:
            return None
        low, high = high + 1, min(2 * high, most)
        best = best_of_about(scenario, slo, high)
    while low < high:
        middle = (low + high) // 2
        tried = best_of_about(scenario, slo, middle)
        if tried.score.attainment >= want:
            best, high = tried, middle
        else:
            low = middle + 1
    return best


def best_of_about(scenario: ClusterScenario, slo: Slo, workers: int) -> RatioOutcome:
    """Returns the outcome with the best attainment among colocated and three splits near the demand's own."""
    tried = [simulate(at_ratio(scenario, p, workers - p), slo) for p in _splits(scenario, workers)]
    return max(tried, key=lambda r: r.score.attainment)


def _splits(scenario: ClusterScenario, workers: int) -> Iterator[int]:
    yield 0
    if workers < 2:
        return
    share = prefill_share(scenario.prefill, scenario.decode, scenario.trace)
    middle = min(workers - 1, max(1, round(share * workers)))
    yield from sorted({max(1, middle - 1), middle, min(workers - 1, middle + 1)})


def prefill_share(prefill: WorkerCosts, decode: WorkerCosts, trace: Trace) -> float:
    """Returns the share (0 to 1) of the trace's compute seconds that is prefill, taking decode batches of 32, and
    half of what could be reused from the cache as reused.
    """
    prefill_s = decode_s = 0.0
    for request, held in zip(trace.requests, cached_tokens(trace), strict=True):
        new = request.input_length - held / 2
        prefill_s += prefill.step_seconds(int(new), new * request.input_length / 2, 0, 0.0)
        decode_s += (
            request.output_length * decode.step_seconds(0, 0.0, DECODES, DECODES * request.input_length) / DECODES
        )
    return prefill_s / (prefill_s + decode_s)


def headroom(scenario: ClusterScenario, slo: Slo, want: float) -> Headroom:
    """Returns the most load that the scenario's cluster takes, given that it takes the trace's own."""
    sustained = max(1.0, scenario.trace.duration / (BACKLOG * slo.ttft_s))
    return highest_load(lambda load: simulate(_faster(scenario, load), slo), want, sustained)


def highest_load(at: Callable[[float], RatioOutcome], want: float, sustained: float) -> Headroom:
    """Returns the highest load up to ``sustained`` that is met, and the lowest above it that isn't, to 4%;
    ``at(load)`` simulates one.

    Beyond ``sustained`` the trace ends before a backlog shows: a load that is met there proves nothing, one that
    isn't does.
    """
    met, reach, over = (1.0, at(1.0)), 1.0, None
    while over is None and reach < MOST_LOAD:
        reach *= 2
        met, over = _judged(reach, at(reach), want, sustained, met, over)
    low = reach / 2
    for _ in range(HALVINGS if over else 0):
        assert over is not None
        middle = math.sqrt(low * over[0])
        met, below = _judged(middle, at(middle), want, sustained, met, None)
        low, over = (low, below) if below else (middle, over)
    if met[0] < sustained < (over[0] if over else MOST_LOAD):
        met, _ = _judged(sustained, at(sustained), want, sustained, met, None)
    if over is None:
        return Headroom(met[0], met[1].score.attainment, None, 0.0, "")
    return Headroom(met[0], met[1].score.attainment, over[0], over[1].score.attainment, miss_reason(over[1]))


Tried = tuple[float, RatioOutcome]


def _judged(
    load: float, found: RatioOutcome, want: float, sustained: float, met: Tried, over: Tried | None
) -> tuple[Tried, Tried | None]:
    """``met`` and ``over`` as they are with one load more."""
    if found.score.attainment < want:
        return met, (load, found)
    return ((load, found) if met[0] < load <= sustained else met), over


def _faster(scenario: ClusterScenario, load: float) -> ClusterScenario:
    return msgspec.structs.replace(scenario, trace=scenario.trace.faster(load))
