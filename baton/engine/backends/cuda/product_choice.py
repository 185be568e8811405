"""Chooses per matrix of bf16 weights how it lies on a card and what multiplies it, by times that were taken.

Knows nothing of devices. Matrices lie in panels, which our kernels read, or row by row, which our kernel of few
rows and cuBLASLt read (kernels/linear/by_row.cuh). Rows are taken where steps of up to 64 rows stay as fast and
larger ones become faster, and cuBLASLt for the numbers of rows at which it is the faster one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from baton.engine.backends.native.program import Weights
from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.kernels.linear.packed import BF16, PackedWeight

FEW = 64  # rows up to which products are ours, so that they keep their bits in company
SLACK = 1.02  # times as long as by panels that steps of few rows may take, because timings differ by some percent
OWN, LIBRARY = 0, 1  # library.cuh: Library::choose


class Matrix(msgspec.Struct, frozen=True, order=True):
    """The sizes of a matrix, (n, k); ``gated`` if it is a gate over what the gate is for."""

    n: int
    k: int
    gated: bool


class ProductTimes(msgspec.Struct, frozen=True):
    """Holds microseconds of a product of ``rows`` rows; None for a way that isn't there or was wrong."""

    rows: int
    panels: float | None
    by_row: float | None
    library: float | None = None

    @property
    def best_by_row(self) -> float:
        """Returns the time of the faster way by rows."""
        return min(map(_time, (self.by_row, self.library)))

    @property
    def told(self) -> str:
        """Returns the figures in words."""
        ways = (("panels", self.panels), ("rows", self.by_row), ("cuBLASLt", self.library))
        return f"{self.rows}: " + " ".join(f"{name} {us:.0f}" for name, us in ways if us is not None)


class ProductChoice(msgspec.Struct, frozen=True):
    """Says whether a matrix lies row by row, and the times that it was chosen by."""

    matrix: Matrix
    by_row: bool
    times: tuple[ProductTimes, ...]

    def ways(self) -> dict[int, int]:
        """Returns by what products go, LIBRARY or OWN, for the numbers of rows above FEW that were timed."""
        return {
            one.rows: LIBRARY if _time(one.library) < _time(one.by_row) else OWN
            for one in self.times
            if one.rows > FEW
        }

    @property
    def told(self) -> str:
        """Returns the choice with its figures, in words."""
        name = f"product {self.matrix.n} x {self.matrix.k}{', gated' if self.matrix.gated else ''}"
        taken = [str(rows) for rows, way in self.ways().items() if way == LIBRARY]
        how = f"by rows, cuBLASLt at {', '.join(taken) or 'no number'} of rows" if self.by_row else "by panels"
        return f"{name}: {how} (us at rows {', '.join(one.told for one in self.times)})"


def chosen(matrix: Matrix, times: Sequence[ProductTimes]) -> ProductChoice:
    """Returns the choice for ``matrix`` by its times, which are of numbers of rows up to FEW and above."""
    keeps = all(one.best_by_row <= _time(one.panels) * SLACK for one in times if one.rows <= FEW)
    many = [one for one in times if one.rows > FEW]
    gains = sum(one.best_by_row for one in many) < sum(_time(one.panels) for one in many)
    are_right = all(one.by_row is not None for one in times)
    return ProductChoice(matrix, are_right and keeps and gains, tuple(times))


def matrices_of(program: Program, weights: Weights) -> tuple[Matrix, ...]:
    """Returns the sizes of all bf16 matrices of ``program``'s layers, each once; those of the head and of experts
    aren't among them.
    """
    return tuple(sorted({*_named(program, weights).values()}))


def names_by_row(program: Program, weights: Weights, choices: Iterable[ProductChoice]) -> frozenset[str]:
    """Returns the names of the weights that are to lie row by row."""
    taken = {choice.matrix for choice in choices if choice.by_row}
    return frozenset(name for name, matrix in _named(program, weights).items() if matrix in taken)


def _named(program: Program, weights: Weights) -> dict[str, Matrix]:
    heads = {op.weight for op in program.ops if isinstance(op, p.LmHead)}
    found: dict[str, Matrix] = {}
    for op, behind in zip(program.ops, (*program.ops[1:], None), strict=True):
        if not isinstance(op, p.Linear) or op.weight in heads or not _is_bf16(weights[op.weight]):
            continue
        n, k = weights[op.weight].shape
        gated = isinstance(behind, p.SwiGlu) and behind.gate_up == op.out and n % 32 == 0  # fused.cuh
        found[op.weight] = Matrix(n, k, gated)
    return found


def _is_bf16(weight: Tensor | PackedWeight) -> bool:
    if isinstance(weight, PackedWeight):
        return weight.kind == BF16
    return weight.dtype == torch.bfloat16


def _time(us: float | None) -> float:
    return float("inf") if us is None else us
