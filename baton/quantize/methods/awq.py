"""AWQ (https://arxiv.org/abs/2306.00978): scales up the inputs that matter before rounding, and clips ranges.

Knows nothing of files. Scales are the inputs' mean magnitudes to a power, which is searched for, as the ranges are:
of each group and row, its lower and its upper end by itself. The error is that of the layer's outputs on the
calibration text, which the inputs' second moments give exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from baton.quantize.grids import Fit, Grid, IntGrid, to_nearest, where_better
from baton.quantize.quantized_weight import QuantizedWeight
from baton.quantize.stats import ActivationStats, output_error

Tie = Callable[[Tensor], Tensor]
POWERS = 20  # exponents that are tried, evenly between 0 and 1
CLIPS = tuple(1 - 0.05 * step for step in range(11))  # shares that are tried of each end of a group's range
BOTH_CLIPS = tuple(1 - 0.025 * step for step in range(21))  # of a symmetric range, whose ends are equal
ROWS = 256  # rows whose ranges are searched at once


def normalised(scales: Tensor) -> Tensor:
    """Returns ``scales`` divided so that the largest and the smallest are inverse to each other."""
    scales = scales.clamp_min(1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


def best_scales(weight: Tensor, stats: ActivationStats, grid: Grid, tie: Tie) -> Tensor:
    """Returns the scales (k,) for a weight's inputs with the least output error; all ones if none is better.

    ``tie`` evens out the scales of inputs that must share theirs.
    """
    hessian, best, least = stats.hessian, torch.ones(weight.shape[1]), float("inf")
    for step in range(POWERS):
        scales = tie(normalised(stats.mean_abs.pow(step / POWERS)))
        off = to_nearest(weight * scales, grid).values() / scales - weight
        if (error := output_error(off, hessian)) < least:
            best, least = scales, error
    return best


def clipped(weight: Tensor, hessian: Tensor, grid: IntGrid) -> QuantizedWeight:
    """Returns a weight (n, k) rounded with the clipped range of each group that has the least output error.

    ``hessian`` (k, k) is the mean of x xᵀ over the inputs.
    """
    found = [_clipped_rows(weight[at : at + ROWS], hessian, grid) for at in range(0, len(weight), ROWS)]
    zeros = None if found[0].zeros is None else torch.cat([fit.zeros for fit in found if fit.zeros is not None])
    return to_nearest(weight, grid, Fit(torch.cat([fit.scales for fit in found]), zeros))


def _clipped_rows(weight: Tensor, hessian: Tensor, grid: IntGrid) -> Fit:
    width = grid.group or weight.shape[1]
    parts = weight.view(len(weight), -1, width)
    blocks = torch.stack([hessian[at : at + width, at : at + width] for at in range(0, weight.shape[1], width)])
    best, least = grid.fit(weight), torch.full(parts.shape[:2], float("inf"))
    for below, above in _shares(grid):
        fit = grid.ranged(parts, below, above)
        assert fit.zeros is not None
        q = grid.number(parts, fit.scales[..., None], fit.zeros[..., None])
        off = (q - fit.zeros[..., None]) * fit.scales[..., None] - parts
        error = (torch.einsum("ngk,gkj->ngj", off, blocks) * off).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best = where_better(better, fit, best)
    return best


def _shares(grid: IntGrid) -> list[tuple[float, float]]:
    """Returns the pairs of shares, under and over zero, that are tried; a symmetric range has equal ends."""
    if grid.symmetric:
        return [(share, share) for share in BOTH_CLIPS]
    return list(itertools.product(CLIPS, CLIPS))
