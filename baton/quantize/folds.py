"""Finds where the scales of a linear layer's inputs can be folded: into the norm or the weight rows that make the
inputs.

Knows nothing of how factors are found. Dividing what makes an input and multiplying the weight that reads it leaves
the product the same, apart from rounding (https://arxiv.org/abs/2211.10438, https://arxiv.org/abs/2306.00978).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.program.ops import (
    GeGlu,
    HalveHeads,
    LayerNorm,
    Linear,
    NormPart,
    Op,
    PagedAttention,
    RmsNorm,
    RopeAppend,
    RotateHeads,
    SwiGlu,
    TemperQueries,
)
from baton.engine.program.program import Program, Weight
from baton.quantize.registers import reads, writes


class Fold(NamedTuple):
    """Names where the inputs of a linear layer come from, so that their scales can be divided out there."""

    norm: str = ""  # weight of a norm; "" if ``product`` is set
    product: str = ""  # weight of a linear layer
    bias: str | None = None  # of ``norm`` or ``product``
    rows: tuple[int, int] = (0, 0)  # first and end row of ``product`` that make the inputs
    heads: tuple[int, int, int] = (0, 1, 0)  # inputs that share a row under GQA: (groups, heads in each, head size)

    def tie(self, scales: Tensor) -> Tensor:
        """Returns ``scales`` with the geometric mean for inputs that share a row, which must have one scale."""
        groups, each, size = self.heads
        if each == 1:
            return scales
        return scales.log().view(groups, each, size).mean(1, keepdim=True).expand(-1, each, -1).exp().reshape(-1)

    def per_row(self, scales: Tensor) -> Tensor:
        """Returns the scale of each of ``rows``, from those of the inputs."""
        groups, each, size = self.heads
        return scales if each == 1 else scales.view(groups, each, size)[:, 0].reshape(-1)


def fold_of(program: Program, ops: Sequence[Op], product: Linear, outs: dict[str, int]) -> Fold | None:
    """Returns where the scales of the inputs of ``product`` can be folded; None if other ops read these inputs too.

    ``ops`` are those of the layer, ``outs`` the number of rows of each weight.
    """
    at = next(place for place, op in enumerate(ops) if op is product)
    maker = _maker(ops[:at], product.x)
    if maker is None or _others_read(ops, at, product.x, maker):
        return None
    match maker:
        case RmsNorm() | LayerNorm() if maker.out == product.x and maker.out != maker.x:
            return Fold(norm=maker.weight, bias=maker.bias if isinstance(maker, LayerNorm) else None)
        case SwiGlu() | GeGlu() if isinstance(before := _maker(ops[:at], maker.gate_up), Linear):
            inner = outs[before.weight] // 2
            return Fold(product=before.weight, bias=before.bias, rows=(inner, 2 * inner))
        case PagedAttention() if (before := _values(ops[:at], maker)) is not None:
            width, end = program.kv_heads * program.head_dim, outs[before.weight]
            heads = program.kv_heads, program.heads // program.kv_heads, program.head_dim
            return Fold(product=before.weight, bias=before.bias, rows=(end - width, end), heads=heads)
    return None


def _maker(ops: Sequence[Op], register: str) -> Op | None:
    """Returns the last of ``ops`` that writes ``register``."""
    return next((op for op in reversed(ops) if register in writes(op)), None)


def _values(ops: Sequence[Op], attention: PagedAttention) -> Linear | None:
    """Returns the linear layer whose last rows make the values of ``attention``, through ops that change q and k
    alone.
    """
    made = _maker(ops, attention.q)
    register = made.qkv if isinstance(made, RopeAppend) else ""
    for op in reversed(ops):
        if isinstance(op, Linear) and op.out == register:
            return op
        if isinstance(op, HalveHeads | TemperQueries | RotateHeads) and op.out == register:
            register = op.x
        elif register in writes(op) and not isinstance(op, NormPart):
            return None
    return None


def _others_read(ops: Sequence[Op], at: int, register: str, maker: Op) -> bool:
    begin = next(place for place, op in enumerate(ops) if op is maker)
    for place, op in enumerate(ops[begin + 1 :], begin + 1):
        if place != at and register in reads(op):
            return True
        if register in writes(op):
            return False
    return False


def stored(norm: Tensor, scales: Tensor, dtype: torch.dtype, weight: Weight) -> tuple[Tensor, Tensor]:
    """Returns a norm's values divided by ``scales``, as the files hold them in ``dtype``, and the scales that this
    amounts to exactly. ``weight`` says what is added to stored numbers, and multiplied.

    A value that ``dtype`` would hold as 0 or as infinity stays as it is: no scale gives it back.
    """

    def kept(values: Tensor) -> Tensor:
        return (values / weight.times - weight.plus).to(dtype)

    def read(numbers: Tensor) -> Tensor:
        return (numbers.float() + weight.plus) * weight.times

    found = kept(norm / scales)
    lost = (norm != 0) & ((read(found) == 0) | ~read(found).isfinite())
    found = torch.where(lost, kept(norm), found)
    wide = read(found)
    return found, torch.where(wide == 0, scales, norm / wide.where(wide != 0, torch.ones_like(wide)))
