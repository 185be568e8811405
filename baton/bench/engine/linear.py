"""Benchmarks linear layers as shares of this machine's limits in the same round.

Knows nothing of models. The limit is the memory read rate for one input row, the rate of dot products for many. A
matrix-vector product goes through copies that together are larger than the caches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from baton.bench.engine.memory import MemoryRead, seconds
from baton.bench.rows import Row, median, paired, spread
from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64
from baton.kernels.linear.cpu import ARGUMENTS, prepared
from baton.kernels.linear.packed import PackedWeight, pack_bf16, quantize

FORMS: dict[str, Callable[[Tensor], PackedWeight]] = {
    "bf16": pack_bf16,
    "W8A8": lambda weight: quantize(weight, 8, 0),
    "W4A8 g128": lambda weight: quantize(weight, 4, 128),
    "W4A8 g32": lambda weight: quantize(weight, 4, 32),
}
SIZE = 2048  # inputs and outputs
COLD_BYTES = 160 << 20  # bytes of weights that take turns, because together they exceed a CPU's caches
DECODE_TARGET = 0.8  # least share of the memory's rate, because one row's product is bound by reading weights
MANY = (16, 512)  # input rows: a batch of decodes, and a chunk of a prompt
MANY_TARGETS = {("W4A8 g128", 16): 0.8, ("W4A8 g128", 512): 0.9}
TILE_TARGETS = {("W8A8", 512): 0.5, ("bf16", 512): 0.45}  # beside AMX's ceiling, which few rows never come near
REPEATS = {16: 24, 512: 4}
PIECES = 64  # pieces into which the ceiling's work is cut, for all threads


def rows(rounds: int) -> Iterator[Row]:
    """Yields a row for each weight form with one input row, and one for each count of MANY if the CPU has dot
    products.
    """
    for name, form in FORMS.items():
        weight = form(torch.randn(SIZE, SIZE))
        yield _one(name, weight, rounds)
        if DotProducts(name != "bf16", 1).rate():
            yield from (_many(name, weight, m, rounds) for m in MANY)


class DotProducts:
    """Measures the CPU's peak rate of int8 or bfloat16 dot products on registers, with about ``operations``
    operations.
    """

    def __init__(self, int8: bool, operations: int) -> None:
        self._call, self._int8 = native.function("ceiling_dots", I32, I32, I64, result=I64), int8
        round_of_all = self._call(int8, PIECES, 1)  # 0 where the CPU has no such instruction
        self.rounds = max(1, operations // round_of_all) if round_of_all else 1

    def rate(self) -> float:
        """Returns operations per second of one run; 0 if the CPU has no such instruction."""
        found: list[int] = []
        elapsed = seconds(lambda: found.append(self._call(self._int8, PIECES, self.rounds) or 0))
        return found[0] / elapsed


def _one(name: str, weight: PackedWeight, rounds: int) -> Row:
    memory = MemoryRead()
    copies = [_copy(weight) for _ in range(-(-COLD_BYTES // weight.nbytes))]
    x, out, function = torch.randn(1, SIZE), torch.empty(1, SIZE), native.function("linear", *ARGUMENTS)
    calls = [prepared(function, x, copy, out) for copy in copies]

    def pass_through() -> None:
        for call in calls:
            call()

    size = sum(copy.nbytes for copy in copies)
    return _row(
        f"linear, {name}, 1 row",
        rounds,
        memory.rate,
        lambda: size / seconds(pass_through),
        "memory read",
        DECODE_TARGET,
    )


def _many(name: str, weight: PackedWeight, m: int, rounds: int) -> Row:
    x, repeats = torch.randn(m, SIZE), REPEATS[m]
    operations = 2 * m * SIZE * SIZE
    call = prepared(native.function("linear", *ARGUMENTS), x, weight, torch.empty(m, SIZE))

    def rate() -> float:
        return operations / min(seconds(call) for _ in range(repeats))

    dots = DotProducts(name != "bf16", operations)

    def peak() -> float:
        return max(dots.rate() for _ in range(repeats))

    target = (TILE_TARGETS if native.isa() == "amx" else MANY_TARGETS).get((name, m), 0.0)
    return _row(f"linear, {name}, {m} rows", rounds, peak, rate, "dot products", target)


def _row(
    name: str, rounds: int, peer: Callable[[], float], own: Callable[[], float], what: str, target: float
) -> Row:
    pairs = [(own(), peer()) for _ in range(rounds + 1)][1:]
    values, ceilings = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    unit = "GB/s" if what == "memory read" else "Gop/s"
    return Row(
        name,
        median(values) / 1e9,
        unit,
        peer=f"{what}, {median(ceilings) / 1e9:.3g} {unit}",
        ratio=paired(values, ceilings),
        spread=spread(values),
        target=target,
    )


def _copy(weight: PackedWeight) -> PackedWeight:
    scales = None if weight.scales is None else weight.scales.clone()
    return dataclasses.replace(weight, data=weight.data.clone(), scales=scales)
