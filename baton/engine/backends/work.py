"""Computes the cost of a model's steps and measures this machine's peak rates, for MFU and MBU.

Knows nothing of steps or batches. The peak rates are measured once at start, in a fraction of a second: reading
memory far larger than the caches, and products of square matrices in the weights' dtype.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from baton.engine.program.ops import LatentAttention, Linear, LmHead, Moe, OwnExperts, PagedAttention
from baton.engine.program.program import Program
from baton.engine.program.rank_program import RankProgram
from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, P
from baton.kernels.linear.packed import ROUNDED_ROWS, W8_OUTLIERS, PackedWeight
from baton.kernels.linear.reference import HeldWeight
from baton.kv.layout.room import context_reads
from baton.protos.measurements import EngineWork
from baton.protos.nouns import KvLayout

READ_BYTES = 128 << 20  # bytes of the buffer that is read, far more than the caches hold
SIDE = {"cpu": 384, "cuda": 4096}  # rows and columns of the matrices
PIECES, ROUNDS = 16, 500  # of ceiling_dots: pieces of the dot products, and their repetitions
# Runs, of which the fastest counts. A product takes a millisecond, so that some are not interrupted.
READS, PRODUCTS = 6, 40
FEWEST, LONGEST_S = 3, 0.2  # least runs, and most seconds, of one measurement


def work_of(
    program: Program,
    weights: Mapping[str, Tensor | PackedWeight],
    layout: KvLayout,
    device: str,
    spares_rows: bool = False,
) -> EngineWork:
    """Returns the cost per token and step of a model that is loaded on ``device``, "cpu" or "cuda", and the
    device's peak rates.

    Of experts, only those that one token uses are counted. With ``spares_rows`` the ops behind the last one that
    stores K, V or state are run for rows alone that choose a token; pairs are counted in all layers.
    """
    linears = [op.weight for op in program.ops if isinstance(op, Linear)]
    elements = {name: _elements(weight) for name, weight in weights.items()}
    read, late = _read(program, elements), _WeightReads(0.0, 0.0, 0.0)
    if spares_rows:
        late = _read(msgspec.structs.replace(program, ops=program.divided[1]), elements)
    size = _read(program, {name: weight.nbytes for name, weight in weights.items()})
    whole, windows = context_reads(layout)
    share = _readers(program)
    return EngineWork(
        token_flops=2.0 * (read.linears + read.experts - late.linears - late.experts),
        sample_flops=2.0 * (read.heads + late.linears + late.experts),
        pair_flops=4.0 * program.heads * program.head_dim * _attending(program),
        step_bytes=sum(size),
        context_bytes=whole * share.get(0, 1.0),
        peak_flops=peak_flops(weights[linears[0]] if linears else None, device),
        peak_bytes=peak_bytes(device),
        windows=tuple((window, size * share.get(window, 1.0)) for window, size in windows),
    )


def work_of_ranks(
    program: Program,
    own: Program,
    weights: Mapping[str, Tensor | PackedWeight],
    layout: KvLayout,
    device: str = "cpu",
    last: RankProgram | None = None,
) -> EngineWork:
    """Returns the cost of ``program``, of which this rank has the share ``own``, and the peak rates of ``device``.

    Other ranks' weights are assumed to have as many bytes per element as this rank's. The last ops of ``last``, the
    share of the rank with the head, are run for rows alone that choose a token.
    """
    found = work_of(own, weights, layout, device)
    shapes = {weight.name: weight.shapes for weight in program.weights}
    elements = {name: float(sum(map(math.prod, parts))) for name, parts in shapes.items()}
    read, late = _read(program, elements), _WeightReads(0.0, 0.0, 0.0)
    if last is not None and (spared := last.last_ops) is not None:
        late = _read(msgspec.structs.replace(program, ops=last.program.ops[spared.begin :]), elements)
    held = _read(own, {name: _elements(weight) for name, weight in weights.items()})
    size = _read(own, {name: weight.nbytes for name, weight in weights.items()})
    width = (size.linears + size.heads) / (held.linears + held.heads)  # bytes of an element
    expert_width = size.experts / held.experts if held.experts else width
    return msgspec.structs.replace(
        found,
        token_flops=2.0 * (read.linears + read.experts - late.linears - late.experts),
        sample_flops=2.0 * (read.heads + late.linears + late.experts),
        pair_flops=4.0 * program.heads * program.head_dim * _attending(program),
        step_bytes=width * (read.linears + read.heads) + expert_width * read.experts,
    )


def of_cards(work: EngineWork, count: int) -> EngineWork:
    """Returns ``work`` with the peak rates of ``count`` cards, where it has one card's."""
    return msgspec.structs.replace(work, peak_flops=count * work.peak_flops, peak_bytes=count * work.peak_bytes)


def _attending(program: Program) -> int:
    """Returns the number of layers that attend, those that read the K and V of others included."""
    slots = _slots(program)
    return program.layers + len(slots) - len(set(slots))


def _readers(program: Program) -> dict[int, float]:
    """Returns how many layers read the K and V of one that has some, on average, by their window."""
    slots = _slots(program)
    stored = Counter(window for window, _ in set(slots))
    return {window: count / stored[window] for window, count in Counter(window for window, _ in slots).items()}


def _slots(program: Program) -> list[tuple[int, int]]:
    """Returns the window and the slot in a page of each layer that attends over pages."""
    ops = [op for op in program.ops if isinstance(op, PagedAttention | LatentAttention)]
    return [(op.window if isinstance(op, PagedAttention) else 0, op.layer) for op in ops]


class _WeightReads(NamedTuple):
    """Holds how much a step reads of the weights of each kind; of experts, what one token uses."""

    linears: float
    heads: float
    experts: float


def _read(program: Program, each: Mapping[str, float]) -> _WeightReads:
    linears = {op.weight for op in program.ops if isinstance(op, Linear)}
    heads = {op.weight for op in program.ops if isinstance(op, LmHead)}
    layers = [op for op in program.ops if isinstance(op, Moe | OwnExperts)]
    experts = sum(each[name] * op.chosen / op.experts for op in layers for name in (op.gate_up, op.down))
    return _WeightReads(sum(each[name] for name in linears), sum(each[name] for name in heads), experts)


def peak_bytes(device: str) -> float:
    """Returns the bytes per second that can be read from the memory of ``device``, as measured."""
    return _measured_bytes(device, torch.get_num_threads())


def peak_flops(weight: Tensor | PackedWeight | None, device: str) -> float:
    """Returns the measured operations per second of ``device`` in the dtype in which it multiplies by ``weight``;
    float32 if that is None.
    """
    threads = torch.get_num_threads()
    if device == "cpu" and isinstance(weight, PackedWeight) and native.library() is not None:
        of_dots = _measured_dots(weight.kind in (W8_OUTLIERS, *ROUNDED_ROWS), threads)
        if of_dots:
            return of_dots
    held = torch.bfloat16 if isinstance(weight, HeldWeight) else torch.float32
    dtype = weight.dtype if isinstance(weight, Tensor) else held
    return _measured_products(dtype, device, threads)


# Each is measured once per process and number of threads, because the machine is the same for other models.


@cache
def _measured_bytes(device: str, threads: int) -> float:
    buffer = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    if device == "cpu" and native.library() is not None:
        read = native.function("ceiling_read", P, I64)
        return READ_BYTES / _best(lambda: read(buffer.data_ptr(), READ_BYTES), device, READS)
    return READ_BYTES / _best(buffer.sum, device, READS)


@cache
def _measured_dots(of_integers: bool, threads: int) -> float:
    """Returns the operations per second of dot products, 0 if the native code has none."""
    found: list[int] = []
    dots = native.function("ceiling_dots", I32, I32, I64, result=I64)
    seconds = _best(lambda: found.append(dots(of_integers, PIECES, ROUNDS) or 0), "cpu", PRODUCTS)
    return found[0] / seconds


@cache
def _measured_products(dtype: torch.dtype, device: str, threads: int) -> float:
    side = SIDE[device]
    a = torch.ones((side, side), dtype=dtype, device=device)
    return 2.0 * side**3 / _best(lambda: a @ a, device, PRODUCTS)


def _best(run: Callable[[], object], device: str, repeats: int) -> float:
    """Returns the seconds of the fastest of some runs; other work on the machine only makes runs longer."""
    taken: list[float] = []
    with torch.inference_mode():
        while len(taken) <= FEWEST or (len(taken) <= repeats and sum(taken) < LONGEST_S):  # the first one warms up
            began = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
    return max(min(taken[1:]), 1e-9)


def _elements(weight: Tensor | PackedWeight) -> int:
    return weight.numel() if isinstance(weight, Tensor) else weight.n * weight.k
