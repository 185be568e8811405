"""Traffic slices and membership turned into what decisions are made by: demand, backlog, one worker's costs. Pure.

Knows nothing of Redis or of who reads the slices. Arrivals say how much comes; answers that ended say how much of
it is found in caches and how long answers are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from baton.cluster.traffic import ClassTraffic, TrafficSlice, by_class
from baton.controller.pressure import BURSTS, Backlog, Demand, WorkerLimits, capacity, pressure
from baton.kv.layout.room import handoff_bytes, held_tokens, pool_tokens
from baton.protos.measurements import AdapterCurve, StepCurve, TransferCurve, WorkerLoad
from baton.protos.nouns import KvLayout, WorkerInfo

__all__ = [
    "AdaptedSteps",
    "ObservedWorker",
    "adapted_steps",
    "backlog",
    "costs",
    "covered",
    "demand",
    "fullness",
    "kv_bytes_per_token",
    "newest",
    "observed_rate",
    "predicted_rate",
    "predicted_tpot",
    "transfer",
]

FRESH_S = 3.0  # older than this, a router's word on its queue is of the past
ENOUGH = 16  # answers whose shape is believed
TAKEN = 0.75  # share of decode's seats or pages from which on newcomers wait for them


class ObservedWorker(msgspec.Struct, frozen=True):
    """Holds one worker's info and load, as its membership entry states them."""

    info: WorkerInfo
    load: WorkerLoad


class AdaptedSteps(msgspec.Struct, frozen=True):
    """Holds a role's measured step times without adapters, and what adapters add to them."""

    bare: StepCurve
    adapters: AdapterCurve


def demand(now: Sequence[TrafficSlice], longer: Sequence[TrafficSlice]) -> Demand:
    """Returns the demand per second of the slices ``now``.

    Shares of cached tokens and lengths of answers are taken from ``longer`` for classes of which fewer than ENOUGH
    answers ended in ``now``.
    """
    seconds = covered(now)
    present, shapes, total = by_class(now), by_class(longer), Demand(0.0, 0.0, 0.0, 0.0, 0.0)
    lately = _sum(present.values())
    whole = lately if lately.ended >= ENOUGH else _sum(shapes.values())
    context = whole.context_tokens / whole.output_tokens if whole.output_tokens else 0.0
    for name, traffic in present.items():
        known = traffic if traffic.ended >= ENOUGH else shapes.get(name, whole)
        shape = known if known.ended else whole
        missed = 1.0 - shape.cached_tokens / shape.prompt_tokens if shape.prompt_tokens else 1.0
        uncached = traffic.arrived_tokens * missed
        read = max(1.0, shape.prompt_tokens - shape.cached_tokens)
        pairs = shape.pairs / read if shape.pairs else traffic.arrived_tokens / max(1, traffic.arrived) / 2
        outputs = shape.output_tokens / shape.ended if shape.ended else 0.0
        total = Demand(
            total.prefill_tokens + uncached / seconds,
            total.pairs + uncached * pairs / seconds,
            total.answers + traffic.arrived / seconds,
            total.output_tokens + traffic.arrived * outputs / seconds,
            context,
        )
    return total


def backlog(workers: Sequence[ObservedWorker], now: Sequence[TrafficSlice], at: float) -> Backlog:
    """Returns the work that runs or waits at workers and, by slices younger than FRESH_S at ``at``, in routers."""
    readers = [w.load for w in workers if w.info.role == "prefill"]
    writers = [w.load for w in workers if w.info.role == "decode"]
    last = {s.router: s for s in now if at - s.at < FRESH_S}.values()
    waiting, tokens = sum(s.waiting for s in last), float(sum(s.waiting_tokens for s in last))
    unread = sum(r.waiting_tokens for r in readers)
    running, preempted = sum(w.running for w in writers), sum(w.waiting for w in writers)
    full = _decode_is_full([w for w in workers if w.info.role == "decode"], bool(unread))
    return Backlog(float(unread), running, preempted, waiting, tokens, full)


def _decode_is_full(writers: Sequence[ObservedWorker], reading: bool) -> bool:
    """Returns whether newcomers wait for decode: most seats write, or pages are taken while nothing is read.

    A seat is also taken while its prompt is read; those are prefill's to free.
    """
    seats = sum(w.info.max_batch for w in writers)
    pages = sum(w.info.pages for w in writers)
    writing = sum(w.load.running + w.load.waiting for w in writers)
    leased = sum(w.load.leased_pages for w in writers)
    return writing >= TAKEN * max(1, seats) or (not reading and bool(writing) and leased >= TAKEN * max(1, pages))


def fullness(
    one: ObservedWorker, chunk_tokens: int, ttft_s: float, tpot_s: float, horizon_s: float
) -> float | None:
    """Returns how full one worker is, by its measured load and what waits there: 1.0 is as much as it carries
    within the SLOs.

    For a decode worker that prefills as well, that time is added. None until its step times are known.
    """
    load, running = one.load, max(1, one.load.running)
    context = held_tokens(one.info.layout, load.leased_pages, running) / running
    known = costs([one], chunk_tokens, ttft_s, tpot_s, context)
    if known is None:
        return None
    if one.info.role == "prefill":
        return (load.busy + known.prompt_seconds(load.waiting_tokens, 0.0) / horizon_s) / BURSTS
    writes = Demand(0.0, 0.0, 0.0, load.decode_tokens_per_s, context)
    there = Backlog(0.0, load.running, load.waiting)
    return pressure(writes, there, known, 0, 1, horizon_s).decode + known.prompt_seconds(
        load.prefill_tokens_per_s, 0.0
    )


def costs(
    workers: Sequence[ObservedWorker], chunk_tokens: int, ttft_s: float, tpot_s: float, context: float
) -> WorkerLimits | None:
    """Returns the costs and limits of one worker: the mean of the workers' measured curves, the least of their
    limits. Its pool holds so many tokens in sequences of ``context`` tokens.

    None until step times are known.
    """
    reader, writer = _curve(workers, "prefill"), _curve(workers, "decode")
    if reader is None or writer is None:
        return None
    infos = [w.info for w in workers]
    return WorkerLimits(
        reader,
        writer,
        chunk_tokens,
        min(i.max_batch for i in infos),
        min(pool_tokens(i.layout, i.pages, context) for i in infos),
        ttft_s,
        tpot_s,
    )


def adapted_steps(workers: Sequence[ObservedWorker], role: str) -> AdaptedSteps | None:
    """Returns the mean of what the role's workers measured of adapters; None until one has seen any."""
    loads = [w.load for w in workers if w.info.role == role]
    bare = [load.bare_curve for load in loads if load.bare_curve is not None]
    adapters = [load.adapter_curve for load in loads if load.adapter_curve is not None]
    if not (bare and adapters):
        return None
    return AdaptedSteps(StepCurve(*_means(bare)), AdapterCurve(*_means(adapters)))


def kv_bytes_per_token(layout: KvLayout, slices: Iterable[TrafficSlice]) -> int:
    """Returns the mean bytes that handoffs send per prompt token that isn't cached, over the requests of the
    slices; at least 1.
    """
    served = [one for each in slices for one in each.served]
    tokens = sum(one.input_tokens for one in served) // max(1, len(served)) or layout.block_tokens
    held = min(tokens - 1, sum(one.cached_tokens for one in served) // max(1, len(served)))
    return max(1, handoff_bytes(layout, tokens, held) // (tokens - held))


def transfer(workers: Iterable[ObservedWorker]) -> TransferCurve:
    """Returns the mean of the workers' measured KV transfer curves; 1 ms per transfer if there are none."""
    found = [w.load.transfer_curve for w in workers if w.load.transfer_curve is not None]
    if not found:
        return TransferCurve(1e-3, 0.0)
    return TransferCurve(fmean(c.fixed for c in found), fmean(c.per_byte for c in found))


def newest(slices: Sequence[TrafficSlice], requests: int) -> list[TrafficSlice]:
    """Returns the last of ``slices`` that list ``requests`` served requests together, all of them if they list
    fewer.
    """
    first, found = len(slices), 0
    while first and found < requests:
        first -= 1
        found += len(slices[first].served)
    return list(slices[first:])


def predicted_tpot(there: Backlog, workers: WorkerLimits, decode: int, context: float) -> float:
    """Returns the predicted seconds per output token at the present load of ``decode`` workers.

    Sequences beyond a worker's seats are taken to share them in turns.
    """
    sequences = max(1.0, (there.running + there.waiting) / max(1, decode))
    seated = min(sequences, float(workers.max_batch))
    return workers.step_seconds(seated, max(1.0, context)) * sequences / seated


def predicted_rate(asked: Demand, workers: WorkerLimits, prefill: int, decode: int) -> float:
    """Returns the predicted output tokens per second: the demand, or less if prefill or decode can't carry it."""
    if not asked.answers:
        return 0.0
    reads = workers.prompt_seconds(asked.prefill_tokens, asked.pairs) / asked.answers
    readable = prefill / reads if reads else float("inf")
    outputs = asked.output_tokens / asked.answers
    return min(asked.answers * outputs, readable * outputs, decode * capacity(workers, max(1.0, asked.context)))


def observed_rate(slices: Sequence[TrafficSlice]) -> float:
    """Returns output tokens per second of the slices, counting only answers that ended."""
    return _sum(by_class(slices).values()).output_tokens / covered(slices)


def covered(slices: Sequence[TrafficSlice]) -> float:
    """Returns the seconds that the slices cover, each once whichever routers report it; at least 0.001."""
    found, until = 0.0, float("-inf")
    for begin, end in sorted((one.at - one.seconds, one.at) for one in slices):
        found += max(0.0, end - max(begin, until))
        until = max(until, end)
    return max(found, 1e-3)


def _curve(workers: Sequence[ObservedWorker], role: str) -> StepCurve | None:
    """Returns the mean step curve of the role's workers; of all workers if those have none; None if nobody has."""
    own = [w.load.step_curve for w in workers if w.info.role == role and w.load.step_curve is not None]
    found = own or [w.load.step_curve for w in workers if w.load.step_curve is not None]
    if not found:
        return None
    return StepCurve(*_means(found))


def _means(curves: Sequence[StepCurve] | Sequence[AdapterCurve]) -> list[float]:
    """Returns the means of the curves' fields, in their order."""
    return [fmean(getattr(c, name) for c in curves) for name in curves[0].__struct_fields__]


def _sum(classes: Iterable[ClassTraffic]) -> ClassTraffic:
    total = ClassTraffic()
    for traffic in classes:
        total.add(traffic)
    return total
