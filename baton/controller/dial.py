"""Simulates recent requests on every prefill:decode ratio of a cluster, as a process of its own.

    python -m baton.controller.dial < DialQuestion.json > DialAnswer.json

Knows nothing of where the requests or curves come from. It runs beside a router, so it lowers its own priority.
Tokens found in caches are left out of the simulation: they are neither computed nor held, so decode's KV pages look
emptier than they are.
"""

from __future__ import annotations

import os
import sys

import msgspec

from baton.cluster.advice import RatioPoint
from baton.cluster.traffic import ServedRequest
from baton.controller.observation import AdaptedSteps
from baton.controller.pressure import WorkerLimits
from baton.planner.costs.adapters import by_curve
from baton.planner.costs.worker import WorkerCosts, from_curve
from baton.planner.score import Slo
from baton.planner.simulator.cluster import ClusterScenario, SimSettings
from baton.planner.sweep import sweep
from baton.planner.traces.trace import Trace, TraceRequest
from baton.protos.measurements import StepCurve, TransferCurve
from baton.protos.nouns import BLOCK_TOKENS

MOST_REQUESTS = 1500  # requests that are simulated at most, because every ratio plays all of them
LEAST_REQUESTS = 20  # requests; fewer are not simulated
WINDOW_S = 15.0  # seconds of a window in which goodput is judged
NICE = 10  # a tenth of a core that a worker keeps busy, because simulating may hardly slow workers down


class DialQuestion(msgspec.Struct, frozen=True):
    """Holds the total number of workers, what one costs, and recent requests.

    ``prefill_adapters`` and ``decode_adapters`` are what LoRA adapters cost each role; None if it isn't known, and
    then the curves of ``costs`` have it as it was lately.
    """

    workers: int
    costs: WorkerLimits
    transfer: TransferCurve
    kv_bytes_per_token: int
    served: tuple[ServedRequest, ...]
    prefill_adapters: AdaptedSteps | None = None
    decode_adapters: AdaptedSteps | None = None


class DialAnswer(msgspec.Struct, frozen=True):
    """Holds the goodput of every ratio and the best one; ``interval`` and ``plateau`` are ranges of prefill
    workers.
    """

    points: tuple[RatioPoint, ...]
    best: tuple[int, int]
    interval: tuple[int, int]
    plateau: tuple[int, int]


def answer(asked: DialQuestion) -> DialAnswer | None:
    """Simulates every ratio and returns the results; None for too few requests (LEAST_REQUESTS) or fewer than 2
    workers.
    """
    trace = trace_of(asked.served)
    if len(trace.requests) < LEAST_REQUESTS or trace.duration <= 0 or asked.workers < 2:
        return None
    costs = asked.costs
    chunk = costs.chunk_tokens  # one setting of workers of both roles
    settings = SimSettings(1, asked.workers - 1, max_batch=costs.max_batch, prefill_chunk=chunk, decode_chunk=chunk)
    slo = Slo(costs.ttft_s, costs.tpot_s)
    reader = _worker(asked, costs.prefill, asked.prefill_adapters, trace)
    writer = _worker(asked, costs.decode, asked.decode_adapters, trace)
    found, _ = sweep(asked.workers, ClusterScenario(settings, reader, writer, trace), slo, WINDOW_S)
    points = tuple(
        RatioPoint(r.prefill, r.decode, r.score.goodput, r.score.attainment, r.score.ttft.p99, r.score.tpot.p99)
        for r in found.ratios
    )
    return DialAnswer(points, (found.best.prefill, found.best.decode), found.interval, found.plateau)


def trace_of(served: tuple[ServedRequest, ...]) -> Trace:
    """Returns the last MOST_REQUESTS requests as a trace, their prompts without cached tokens."""
    kept = sorted(served, key=lambda s: s.at)[-MOST_REQUESTS:]
    first = kept[0].at if kept else 0.0
    requests = (
        TraceRequest(s.at - first, max(1, s.input_tokens - s.cached_tokens), s.output_tokens, (), s.adapter)
        for s in kept
    )
    return Trace("recent traffic", tuple(requests))


def _worker(asked: DialQuestion, curve: StepCurve, adapted: AdaptedSteps | None, trace: Trace) -> WorkerCosts:
    kv_tokens = max(asked.costs.kv_tokens, BLOCK_TOKENS)
    curve = curve if adapted is None else adapted.bare
    found = from_curve("a live worker", curve, kv_tokens, asked.kv_bytes_per_token, asked.transfer)
    return found if adapted is None else by_curve(found, trace.adapter_shares, adapted.adapters)


def main() -> None:
    """Reads a DialQuestion from stdin and writes a DialAnswer to stdout (null if there is none), both JSON."""
    os.nice(NICE)
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=DialQuestion)
    sys.stdout.buffer.write(msgspec.json.encode(answer(asked)))


if __name__ == "__main__":
    main()
