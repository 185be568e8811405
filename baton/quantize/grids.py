"""The sets of numbers (grids) that a weight can be rounded to: integers, NF4, FP8 (e4m3), MXFP4.

Knows nothing of models or of how errors are made up for. A grid's ``fit`` finds each group's scale, ``number``
rounds. Sources: NF4 https://arxiv.org/abs/2305.14314; MXFP4 is the OCP Microscaling specification 1.0; e4m3
https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton.quantize.quantized_weight import QuantizedWeight

TINY = 1e-10  # the least scale: that of a group of zeros
SHRINKS = 40  # clipped ranges that are tried
LEAST_RANGE = 0.5  # of them, as a share of the whole range
# Normal quantiles with equal mass between neighbours and an exact zero, scaled to -1..1 (QLoRA, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Values of the 4-bit float E2M1 by their code: a sign, two bits of exponent, one of mantissa (OCP MX 1.0).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_TOP_EXPONENT = 2  # of 6.0 = 1.5 x 2²
E4M3_TOP = 448.0  # the largest number of float8 E4M3


class Fit(NamedTuple):
    """The scales of a weight's groups, and zero points if the grid has any, both float32 (n, groups)."""

    scales: Tensor
    zeros: Tensor | None


def where_better(better: Tensor, tried: Fit, best: Fit) -> Fit:
    """Returns the scales and zeros of ``tried`` where ``better`` (n, groups) is true, those of ``best``
    elsewhere.
    """
    scales = torch.where(better, tried.scales, best.scales)
    if tried.zeros is None or best.zeros is None:
        return Fit(scales, None)
    return Fit(scales, torch.where(better, tried.zeros, best.zeros))


class Grid(Protocol):
    """A set of numbers that weights can be rounded to."""

    @property
    def bits(self) -> int:
        """Returns the bits per number."""

    @property
    def group(self) -> int:
        """Returns the number of inputs that share a scale; 0 for a whole row."""

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Fit:
        """Returns the scales for a weight (n, k); ``importance`` (k,) weights each input's squared error, if scales
        are searched for.
        """

    def number(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Returns the index of the nearest number for each weight, as int32; ``scales`` and ``zeros`` must
        broadcast to it.
        """

    def finish(self, q: Tensor, fit: Fit) -> QuantizedWeight:
        """Returns the rounded weight that indices ``q`` (n, k) and ``fit`` make up."""


def to_nearest(weight: Tensor, grid: Grid, fit: Fit | None = None) -> QuantizedWeight:
    """Returns a weight (n, k) rounded to the nearest number of ``grid``; scales are found unless ``fit`` gives
    them.
    """
    fit = fit or grid.fit(weight)
    groups = fit.scales.shape[1]
    parts = weight.view(len(weight), groups, -1)
    zeros = None if fit.zeros is None else fit.zeros[..., None]
    return grid.finish(grid.number(parts, fit.scales[..., None], zeros).view_as(weight), fit)


class IntGrid(NamedTuple):
    """Integers of ``bits`` bits with a scale and a zero point for each group of inputs.

    Scales are float16 numbers, as in checkpoints; ``wide`` keeps them in float32.
    """

    bits: int
    group: int  # inputs per scale; 0 for a whole row
    symmetric: bool = True  # whether the zero point is the middle
    search: bool = False  # whether clipped ranges are tried for the least squared error
    wide: bool = False

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Fit:
        """Returns scales and zeros for a weight (n, k), of the full range or, with ``search``, of the best clipped
        range.
        """
        parts = weight.view(len(weight), -1, self.group or weight.shape[1])
        whole = self.ranged(parts)
        if not self.search:
            return whole
        weights = torch.ones(weight.shape[1]) if importance is None else importance
        weights = weights.view(1, *parts.shape[1:])
        best, least = whole, self._error(parts, whole, weights)
        for step in range(1, SHRINKS):
            share = 1 - (1 - LEAST_RANGE) * step / SHRINKS
            tried = self.ranged(parts, share, share)
            error = self._error(parts, tried, weights)
            better = error < least
            least = torch.where(better, error, least)
            best = where_better(better, tried, best)
        return best

    def number(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Returns round(weight / scale) + zero, clamped to the bits, as int32."""
        assert zeros is not None
        return (torch.round(weight / scales) + zeros).clamp_(0, self.top).to(torch.int32)

    def finish(self, q: Tensor, fit: Fit) -> QuantizedWeight:
        """Returns the rounded weight that integers ``q`` (n, k) and ``fit`` make up."""
        return QuantizedWeight(q, fit.scales, self.bits, self.group, fit.zeros, wide=self.wide)

    def ranged(self, parts: Tensor, below: float = 1.0, above: float = 1.0) -> Fit:
        """Returns scales and zeros for each group's range, which always includes zero.

        ``parts`` is a weight as (n, groups, inputs); ``below`` and ``above`` are the shares of the range under and
        over zero that are kept.
        """
        low, high = parts.amin(-1).clamp(max=0) * below, parts.amax(-1).clamp(min=0) * above
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scales = self._stored(((high - low) / self._steps).clamp_min(TINY))
        middle = torch.full_like(scales, 1 << (self.bits - 1))
        return Fit(scales, middle if self.symmetric else torch.round(-low / scales).clamp_(0, self.top))

    @property
    def top(self) -> int:
        """Returns the largest integer of the grid."""
        return (1 << self.bits) - 1

    @property
    def _steps(self) -> int:
        return self.top - (self.bits == 8 and self.symmetric)  # int8's -128 has no positive twin

    def _stored(self, scales: Tensor) -> Tensor:
        return scales if self.wide else scales.half().float().clamp_min(2.0**-24)

    def _error(self, parts: Tensor, fit: Fit, weights: Tensor) -> Tensor:
        assert fit.zeros is not None
        q = self.number(parts, fit.scales[..., None], fit.zeros[..., None])
        off = (q - fit.zeros[..., None]) * fit.scales[..., None] - parts
        return (off.square_() * weights).sum(-1)


class TableGrid(NamedTuple):
    """The entries of a table from -1 to 1, scaled by each block's largest magnitude, as NF4 in blocks of 64."""

    codebook: Tensor  # entries, ascending
    group: int  # inputs per block
    bits: int = 4

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Fit:
        """Returns each block's largest magnitude as its scale."""
        return Fit(weight.view(len(weight), -1, self.group).abs().amax(-1).clamp_min(TINY), None)

    def number(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Returns the index of the nearest table entry, as int32."""
        between = (self.codebook[1:] + self.codebook[:-1]) / 2
        return torch.bucketize((weight / scales).contiguous(), between).to(torch.int32)

    def finish(self, q: Tensor, fit: Fit) -> QuantizedWeight:
        """Returns the rounded weight that table indices ``q`` (n, k) and ``fit`` make up."""
        return QuantizedWeight(q, fit.scales, self.bits, self.group, codebook=self.codebook)


class MxGrid(NamedTuple):
    """MXFP4: e2m1 numbers, 32 of which share a power of two.

    The specification's exponent puts a block's largest magnitude in 4 to 8, clipped at 6; that exponent or the next
    is taken, whichever has the smaller squared error.
    """

    group: int = 32
    bits: int = 4

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Fit:
        """Returns each block's scale, a power of two."""
        parts = weight.view(len(weight), -1, self.group)
        most = parts.abs().amax(-1).clamp_min(2.0**-120)
        low = torch.exp2(torch.floor(torch.log2(most)) - E2M1_TOP_EXPONENT)
        errors = [self._error(parts, scale) for scale in (low, 2 * low)]
        return Fit(torch.where(errors[0] <= errors[1], low, 2 * low), None)

    def number(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Returns the bits of the nearest e2m1 number, as int32: the sign bit, then the index of the magnitude."""
        scaled = (weight / scales).clamp(-6, 6)
        heads = torch.tensor(E2M1[:8])
        place = torch.bucketize(scaled.abs().contiguous(), (heads[1:] + heads[:-1]) / 2)
        return (place + 8 * (scaled < 0)).to(torch.int32)

    def finish(self, q: Tensor, fit: Fit) -> QuantizedWeight:
        """Returns the rounded weight that e2m1 bits ``q`` (n, k) and ``fit`` make up."""
        return QuantizedWeight(q, fit.scales, self.bits, self.group, codebook=torch.tensor(E2M1))

    def _error(self, parts: Tensor, scale: Tensor) -> Tensor:
        levels = torch.tensor(E2M1)[self.number(parts, scale[..., None], None).long()]
        return (levels * scale[..., None] - parts).square_().sum(-1)


class Fp8Grid(NamedTuple):
    """float8 e4m3 numbers with a scale per row."""

    group: int = 0
    bits: int = 8

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Fit:
        """Returns scales (n, 1) by which each row's largest magnitude becomes 448."""
        return Fit((weight.abs().amax(1, keepdim=True) / E4M3_TOP).clamp_min(TINY), None)

    def number(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Returns the bits of the nearest e4m3 number, as int32."""
        scaled = (weight / scales).clamp(-E4M3_TOP, E4M3_TOP)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)

    def finish(self, q: Tensor, fit: Fit) -> QuantizedWeight:
        """Returns the rounded weight that e4m3 bits ``q`` (n, k) and ``fit`` make up."""
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num_()
        return QuantizedWeight(q, fit.scales, self.bits, self.group, codebook=every)
