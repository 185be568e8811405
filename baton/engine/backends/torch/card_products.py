"""Multiplies by quantized weights with torch's own products: int8, fp8 e4m3 and int4.

Knows nothing of whether a card has them, or of which is faster there (``product_trials.py`` tries them). int8 and
fp8 round rows as the engine's own kernels do; int4 takes rows in bf16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.linear.packed import E4M3, E4M3_A8, W4, W8, PackedWeight
from baton.kernels.linear.panels.layout import from_steps, spread
from baton.kernels.linear.reference import HeldWeight, e4m3_rows, quantize_rows

TILES = 8  # of 16 inputs, that an int4 weight is packed by
GROUPS = (32, 64, 128, 256)  # inputs per scale that torch's int4 has
ROWS = 32  # a product of integers on a card takes more than 16 rows, by eights


class Int8Product(HeldWeight):
    """int8 weights with a scale per row, by ``torch._int_mm``."""

    name = "_int_mm"

    def __init__(self, weight: PackedWeight, device: str) -> None:
        assert weight.row_scale is not None
        self.n, self.k = weight.shape
        self._weight = weight.integers().to(device)
        self._scale = weight.row_scale[: weight.n].to(device)
        self.nbytes = self._weight.nbytes + self._scale.nbytes

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Returns whether the weight has this form."""
        return weight.kind == W8 and not weight.group and not (weight.n % 8 or weight.k % 8)

    @staticmethod
    def bytes_of(weight: PackedWeight) -> int:
        """Returns the bytes that the weight takes in this form."""
        return weight.n * (weight.k + 4)

    def product(self, x: Tensor) -> Tensor:
        """Returns x · weightᵀ in float32; rows are rounded to int8."""
        q, scale = quantize_rows(x.float())
        found: Tensor = torch._int_mm(_padded(q.nan_to_num().to(torch.int8), ROWS), self._weight.t())
        return found[: len(x)].float() * scale * self._scale

    def rounded(self, x: Tensor) -> Tensor:
        """Returns the rows rounded to int8."""
        q, scale = quantize_rows(x)
        return q * scale


class Fp8Product(HeldWeight):
    """e4m3 weights with a scale per row, by ``torch._scaled_mm``; rows have a scale each, or one that is given."""

    name = "_scaled_mm"

    def __init__(self, weight: PackedWeight, device: str) -> None:
        assert weight.row_scale is not None
        self.n, self.k = weight.shape
        self._weight = from_steps(weight.data.view(torch.float8_e4m3fn), 4, weight.n, weight.k).to(device)
        self._scale = weight.row_scale[: weight.n].to(device)
        self._given = 0.0 if weight.table is None else float(weight.table)
        self._one = torch.ones((), device=device)
        self.nbytes = self._weight.nbytes + self._scale.nbytes

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Returns whether the weight has this form."""
        return weight.kind in (E4M3, E4M3_A8) and not weight.group and not (weight.n % 16 or weight.k % 16)

    @staticmethod
    def bytes_of(weight: PackedWeight) -> int:
        """Returns the bytes that the weight takes in this form."""
        return weight.n * (weight.k + 4)

    def product(self, x: Tensor) -> Tensor:
        """Returns x · weightᵀ in float32; rows are rounded to e4m3."""
        q, scale = self._rows(x.float())
        rows = _padded(q, 16).to(torch.float8_e4m3fn)
        found: Tensor = torch._scaled_mm(
            rows, self._weight.t(), scale_a=self._one, scale_b=self._one, out_dtype=torch.bfloat16
        )
        return found[: len(x)].float() * scale * self._scale

    def rounded(self, x: Tensor) -> Tensor:
        """Returns the rows rounded to e4m3."""
        q, scale = self._rows(x)
        return q * scale

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self._given:
            return e4m3_rows(x)
        q = (x * (1.0 / self._given)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
        return q, self._one * self._given


class Int4Product(HeldWeight):
    """int4 weights with a scale per group, by ``_weight_int4pack_mm``."""

    name = "_weight_int4pack_mm"

    def __init__(self, weight: PackedWeight, device: str) -> None:
        assert weight.row_scale is not None
        assert weight.scales is not None
        self.n, self.k, self._group = weight.n, weight.k, weight.group
        unit = weight.row_scale[: weight.n, None]
        scales = self._by_group(weight, weight.scales) * unit
        lows = torch.zeros_like(scales) if weight.mins is None else -self._by_group(weight, weight.mins) * unit
        self._scales = torch.stack((scales, lows), -1).transpose(0, 1).contiguous().bfloat16().to(device)
        q = (weight.integers() + 8).int()
        if device == "cpu":
            self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, TILES)
            self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        else:
            pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8).to(device)
            self._weight = torch.ops.aten._convert_weight_to_int4pack(pairs, TILES)
            self._multiply = torch.ops.aten._weight_int4pack_mm
        self.nbytes = self._weight.nbytes + self._scales.nbytes

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Returns whether the weight has this form."""
        return weight.form == W4 and weight.group in GROUPS and not (weight.n % 64 or weight.k % (16 * TILES))

    @staticmethod
    def bytes_of(weight: PackedWeight) -> int:
        """Returns the bytes that the weight takes in this form."""
        return weight.n * weight.k // 2 + 4 * weight.n * weight.k // weight.group

    def product(self, x: Tensor) -> Tensor:
        """Returns x · weightᵀ in bf16; rows are rounded to bf16."""
        found: Tensor = self._multiply(x.bfloat16().contiguous(), self._weight, self._group, self._scales)
        return found

    def rounded(self, x: Tensor) -> Tensor:
        """Returns the rows rounded to bf16."""
        return x.bfloat16().float()

    def _by_group(self, weight: PackedWeight, parts: Tensor) -> Tensor:
        return spread(parts, weight.group, weight.n, weight.k)[:, :: weight.group].float()


FORMS = (Int8Product, Fp8Product, Int4Product)


def _padded(rows: Tensor, multiple: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, -len(rows) % multiple))
