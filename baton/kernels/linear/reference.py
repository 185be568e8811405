"""The dense layer, for plain and for packed weights.

Knows nothing of what its rows mean. A float32 row alone and the same row in a batch agree within the rounding of a
float32 sum. Whether their bits agree depends on the BLAS: MKL's AVX2 and AVX-512 paths keep them if the number of
rows is a multiple of four, so the caller pads. A BLAS that picks its path by shape, as on CPUs with AMX, does not.
The native op (``kernels/dense``) keeps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.linear.packed import BF16, E4M3, E4M3_A8, E4M3_A16, W8_OUTLIERS, PackedWeight, is_weight_only

FLOOR = 1e-30  # the magnitude below which a row counts as zero


class HeldWeight(ABC):
    """A weight (n, k) that a library multiplies by in a form of its own."""

    n: int
    k: int
    nbytes: int  # that a product reads

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Returns x · weightᵀ, (rows, n) in any float dtype, for x (rows, k)."""

    @abstractmethod
    def rounded(self, x: Tensor) -> Tensor:
        """Returns the rows (rows, k) that are multiplied in place of x, both float32."""


def linear(x: Tensor, weight: Tensor | PackedWeight | HeldWeight, bias: Tensor | None = None) -> Tensor:
    """Returns x · weightᵀ + bias, (rows, out) in x's dtype, for x (rows, in) and a weight (out, in).

    With an integer weight the rows of x are first rounded to int8, each by its own absmax / 127 (for W8_OUTLIERS
    without the inputs from its table's threshold on), with an e4m3 one to e4m3 by absmax / 448; with a packed bf16
    one, or one whose kind says so, to bf16. Sums and scales are float32.
    """
    if isinstance(weight, PackedWeight | HeldWeight):
        wide = weight.product(x).float() if isinstance(weight, HeldWeight) else _by_packed(x.float(), weight)
        return (wide if bias is None else wide + bias.float()).to(x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows (rows, in) float32 rounded to integers in -127..127, as float32, and their scales (rows, 1).

    A row with a NaN has a NaN scale.
    """
    scaled, scale = _scaled(x, 127.0)
    return torch.round(scaled), scale


def e4m3_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows (rows, in) float32 rounded to e4m3 numbers up to 448, as float32, and their scales (rows, 1)."""
    scaled, scale = _scaled(x, 448.0)
    return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float(), scale


def published_rows(x: Tensor, weight: PackedWeight) -> Tensor:
    """Returns rows (rows, in) float32 as an E4M3_A8 weight takes them: e4m3 numbers times their scales.

    The scale is the weight's own if it has one, else that of each row, or of each group of a row if the weight has
    groups.
    """
    assert weight.table is not None
    given = float(weight.table)
    if given:
        return (x * (1.0 / weight.table)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * given
    parts = x.split(weight.group or x.shape[1], 1)
    return torch.cat([q * scale for q, scale in map(e4m3_rows, parts)], 1)


def _scaled(x: Tensor, top: float) -> tuple[Tensor, Tensor]:
    most = x.abs().amax(-1, keepdim=True)
    dead = ~(most >= FLOOR)
    inverse = torch.where(dead, torch.zeros_like(most), top / most)
    return x * inverse, torch.where(dead & ~most.isnan(), torch.zeros_like(most), most / top)


def _by_packed(x: Tensor, weight: PackedWeight) -> Tensor:
    if weight.kind == W8_OUTLIERS:
        assert weight.table is not None
        large = torch.where(x.abs() >= weight.table, x, 0)
        q, scale = quantize_rows(x.where(large == 0, 0))
        return F.linear(q, weight.wide) * scale + F.linear(large, weight.wide)
    if weight.kind == E4M3_A8:
        return F.linear(published_rows(x, weight), weight.wide)
    if weight.kind in (BF16, E4M3_A16) or is_weight_only(weight.kind):
        return F.linear(x.bfloat16().float(), weight.wide)
    q, scale = e4m3_rows(x) if weight.kind == E4M3 else quantize_rows(x)
    return F.linear(q, weight.wide) * scale
