"""How many of which accelerator: for one model, one trace, one pair of SLOs. Torch-free.

Knows nothing of consoles. For each accelerator it takes the fewest ranks that hold model and longest request, then
looks for the fewest workers of which some ratio, or colocated, meets the SLOs for enough requests. Ratios are
tried around the one that the demand asks for, so this is an estimate: ``baton plan`` sweeps them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from baton.planner.cluster_sim import Scenario, SimSettings
from baton.planner.costs import (
    USABLE_MEMORY,
    Accelerator,
    WorkerCosts,
    accelerators,
    activation_bytes,
    roofline,
)
from baton.planner.model_shape import ModelShape
from baton.planner.score import Slo
from baton.planner.sweep import Ratio, simulate
from baton.planner.trace_stats import cached_tokens
from baton.planner.traces import Trace
from baton.protos.errors import ConfigError

RANKS = (1, 2, 4, 8)
CHUNK = 2048


class Memory(msgspec.Struct, frozen=True):
    """Of one worker, in bytes: what is there and what takes it."""

    usable: float
    weights: float
    activations: float
    kv: float
    kv_bytes_per_token: int
    kv_tokens: int


class Size(msgspec.Struct, frozen=True):
    """``found`` is None when ``most`` workers are too few; ``why`` says then what the best of them lacked."""

    accelerator: str
    ranks: int
    memory: Memory
    found: Ratio | None
    accelerators: int
    per_hour: float | None
    why: str


def size(
    shape: ModelShape, trace: Trace, slo: Slo, want: float, names: Sequence[str], most: int,
    prices: dict[str, float] | None = None,
) -> list[Size]:  # fmt: skip
    """One answer per accelerator that can hold the model; cheapest (or fewest) first, those that can't last."""
    sheets = accelerators()
    unknown = [name for name in names if name not in sheets]
    if unknown:
        raise ConfigError(f"accelerator {unknown[0]!r} is unknown; choose of {', '.join(sorted(sheets))}", "gpus")
    longest = max(r.input_length + r.output_length for r in trace.requests)
    sizes = []
    for name in names:
        ranks = fewest_ranks(shape, sheets[name], longest)
        if ranks is not None:
            sizes.append(_size(shape, name, sheets[name], ranks, trace, slo, want, most, (prices or {}).get(name)))
    if not sizes:
        raise ConfigError(
            f"no accelerator of these holds {shape.name} and a request of {longest} tokens on {RANKS[-1]} ranks",
            "gpus",
        )
    return sorted(sizes, key=lambda s: (s.found is None, s.per_hour or 0.0, s.accelerators))


def fewest_ranks(shape: ModelShape, sheet: Accelerator, longest: int) -> int | None:
    """Ranks that hold the weights, one step's activations and the longest request; None when eight don't."""
    for ranks in RANKS:
        if memory(shape, sheet, ranks).kv_tokens >= longest:
            return ranks
    return None


def memory(shape: ModelShape, sheet: Accelerator, ranks: int) -> Memory:
    """What a worker of that many ranks has room for."""
    usable = ranks * sheet.memory * USABLE_MEMORY
    activations = activation_bytes(shape, CHUNK)
    kv = max(0.0, usable - shape.weight_bytes - activations)
    return Memory(
        usable, shape.weight_bytes, activations, kv, shape.kv_bytes_per_token, int(kv / shape.kv_bytes_per_token)
    )


def _size(
    shape: ModelShape, name: str, sheet: Accelerator, ranks: int, trace: Trace, slo: Slo, want: float, most: int,
    price: float | None,
) -> Size:  # fmt: skip
    costs = roofline(shape, name, sheet, ranks, CHUNK)
    low, high = 1, 1
    best = _best_of(costs, trace, slo, high)
    while best.score.attainment < want and high < most:
        low, high = high + 1, min(2 * high, most)
        best = _best_of(costs, trace, slo, high)
    if best.score.attainment < want:
        late = f"{best.score.late_first:.1%} late first tokens, {best.score.late_tokens:.1%} slow answers"
        why = f"{most} workers reach {best.score.attainment:.1%} at best ({late})"
        return Size(name, ranks, memory(shape, sheet, ranks), None, most * ranks, None, why)
    while low < high:
        middle = (low + high) // 2
        tried = _best_of(costs, trace, slo, middle)
        if tried.score.attainment >= want:
            best, high = tried, middle
        else:
            low = middle + 1
    count = high * ranks
    per_hour = None if price is None else price * count
    return Size(name, ranks, memory(shape, sheet, ranks), best, count, per_hour, "")


def _best_of(costs: WorkerCosts, trace: Trace, slo: Slo, workers: int) -> Ratio:
    tried = [
        simulate(Scenario(SimSettings(p, workers - p), costs, costs, trace), slo)
        for p in _ratios(costs, trace, workers)
    ]
    return max(tried, key=lambda r: r.score.attainment)


def _ratios(costs: WorkerCosts, trace: Trace, workers: int) -> Iterator[int]:
    """Colocated, and prefill workers around their share of the work."""
    yield 0
    if workers < 2:
        return
    share = prefill_share(costs, trace)
    middle = min(workers - 1, max(1, round(share * workers)))
    yield from sorted({max(1, middle - 1), middle, min(workers - 1, middle + 1)})


def prefill_share(costs: WorkerCosts, trace: Trace) -> float:
    """Seconds of prefill over all, with decodes in batches of 32; half of what may be reused is."""
    reads = writes = 0.0
    for request, held in zip(trace.requests, cached_tokens(trace), strict=True):
        new = request.input_length - held / 2
        reads += costs.step_seconds(int(new), new * request.input_length / 2, 0, 0.0)
        writes += request.output_length * costs.step_seconds(0, 0.0, 32, 32.0 * request.input_length) / 32
    return reads / (reads + writes)
