"""Where factors of a product's inputs go: into the norm, the values or the up rows that those inputs come from.

Knows nothing of how factors are found. Dividing what makes an input and multiplying the weight that reads it
changes nothing but the rounding (https://arxiv.org/abs/2211.10438, https://arxiv.org/abs/2306.00978).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.program.ops import Linear, Op, PagedAttention, RmsNorm, SwiGlu
from baton.engine.program.program import Program
from baton.quantize.layers import reads, writes


class Fold(NamedTuple):
    """Names what makes a product's inputs: a norm's weight, or ``rows`` of the weight ``product`` with its bias.

    ``heads`` are the inputs that share a row: (groups, heads in each, their size).
    """

    norm: str = ""
    product: str = ""
    bias: str | None = None
    rows: tuple[int, int] = (0, 0)
    heads: tuple[int, int, int] = (0, 1, 0)

    def tie(self, scales: Tensor) -> Tensor:
        """Returns factors that inputs of the same row share: their geometric mean."""
        groups, each, size = self.heads
        if each == 1:
            return scales
        return scales.log().view(groups, each, size).mean(1, keepdim=True).expand(-1, each, -1).exp().reshape(-1)

    def per_row(self, scales: Tensor) -> Tensor:
        """Returns the factor of each of ``rows``."""
        groups, each, size = self.heads
        return scales if each == 1 else scales.view(groups, each, size)[:, 0].reshape(-1)


def fold_of(program: Program, ops: Sequence[Op], product: Linear, outs: dict[str, int]) -> Fold | None:
    """Returns where factors of the inputs of ``product`` may go; None where others read them too.

    ``outs`` has the number of rows of each weight.
    """
    at = next(place for place, op in enumerate(ops) if op is product)
    maker = next((op for op in reversed(ops[:at]) if product.x in writes(op)), None)
    if maker is None or _others_read(ops, at, product.x, maker):
        return None
    before = next((op for op in reversed(ops[:at]) if isinstance(op, Linear)), None)
    match maker:
        case RmsNorm():
            return Fold(norm=maker.weight)
        case SwiGlu() if before is not None:
            inner = outs[before.weight] // 2
            return Fold(product=before.weight, bias=before.bias, rows=(inner, 2 * inner))
        case PagedAttention() if before is not None:
            width, end = program.kv_heads * program.head_dim, outs[before.weight]
            heads = program.kv_heads, program.heads // program.kv_heads, program.head_dim
            return Fold(product=before.weight, bias=before.bias, rows=(end - width, end), heads=heads)
    return None


def _others_read(ops: Sequence[Op], at: int, register: str, maker: Op) -> bool:
    begin = next(place for place, op in enumerate(ops) if op is maker)
    for place, op in enumerate(ops[begin + 1 :], begin + 1):
        if place != at and register in reads(op):
            return True
        if register in writes(op):
            return False
    return False


def stored(norm: Tensor, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns a norm's weight divided by ``scales`` as a file holds it, and the factors that this is exactly."""
    found = (norm / scales).to(dtype)
    wide = found.float()
    return found, torch.where(wide == 0, scales, norm / wide.where(wide != 0, torch.ones_like(wide)))
