"""GPTQ (https://arxiv.org/abs/2210.17323): rounds input by input, and lets later inputs compensate for the error.

Knows nothing of files. Inputs are taken in the order of falling second moments (act-order). Groups are neighbours
in the file's order, whose scales are found beforehand; with ``regroup`` groups follow the new order instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.quantize.grids import Fit, IntGrid
from baton.quantize.methods.inverse_factor import BLOCK, InverseFactor
from baton.quantize.quantized_weight import QuantizedWeight, group_numbers, stacked

ROWS = 1024  # rows that are rounded at once, which bounds what lies beside the weight
FIT_ROWS = 128  # rows whose scales are searched for at once, because what that reads stays in a core's cache


def gptq(
    weight: Tensor, hessian: Tensor, grid: IntGrid, act_order: bool = True, regroup: bool = False
) -> QuantizedWeight:
    """Returns a weight (n, k) rounded for the least output error under ``hessian`` (k, k), the mean of x xᵀ.

    ``hessian`` must be finite, and is overwritten. Beside both, memory holds ROWS rows.
    """
    k = weight.shape[1]
    moments = hessian.diagonal().clone()
    order = torch.argsort(moments, descending=True, stable=True) if act_order else torch.arange(k)
    groups = group_numbers(k, grid.group)
    of = groups[torch.argsort(order)] if regroup else groups
    factor, found = InverseFactor(hessian, order), list[QuantizedWeight]()
    for at in range(0, len(weight), ROWS):
        ordered = weight[at : at + ROWS, order]
        fitted = (ordered, moments[order]) if regroup else (weight[at : at + ROWS], moments)
        fit = _fit(grid, *fitted)
        q = _rounds(ordered, factor, grid, fit, of[order])
        found.append(grid.finish(q[:, torch.argsort(order)], fit))
    whole = stacked(found)
    return whole._replace(groups_of=of) if regroup and grid.group else whole


def _fit(grid: IntGrid, weight: Tensor, importance: Tensor) -> Fit:
    """Returns the scales and zeros of ``grid`` for a weight (n, k), FIT_ROWS rows at a time."""
    fits = [grid.fit(rows, importance) for rows in weight.split(FIT_ROWS)]
    zeros = [fit.zeros for fit in fits if fit.zeros is not None]
    return Fit(torch.cat([fit.scales for fit in fits]), torch.cat(zeros))


def _rounds(weight: Tensor, factor: InverseFactor, grid: IntGrid, fit: Fit, of: Tensor) -> Tensor:
    """Returns the rounded integers (uint8), input by input in the given order; ``weight`` is overwritten."""
    assert fit.zeros is not None
    k = weight.shape[1]
    q = torch.empty(weight.shape, dtype=torch.uint8)
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        scales, zeros = fit.scales[:, of[start:end]], fit.zeros[:, of[start:end]]
        factors = factor.rows(start, end)
        rows = factors[:, : end - start]
        q[:, start:end], errors = _block(weight[:, start:end], rows, scales, zeros, grid.top)
        weight[:, end:].addmm_(errors, factors[:, end - start :], alpha=-1)
    return q


def _block(part: Tensor, rows: Tensor, scales: Tensor, zeros: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Rounds some inputs one by one; returns their integers, and the errors for later inputs to compensate.

    All tensors are transposed so that an input's weights are contiguous.
    """
    part, scales, zeros = (x.T.contiguous() for x in (part, scales, zeros))
    q, errors, steps = torch.empty_like(part), torch.empty_like(part), rows.diagonal().tolist()
    for i, step in enumerate(steps):
        q[i] = (part[i] / scales[i]).round_().add_(zeros[i]).clamp_(0, top)
        errors[i] = (part[i] - (q[i] - zeros[i]) * scales[i]) / step
        part[i + 1 :].addr_(rows[i, i + 1 :], errors[i], alpha=-1)
    return q.T, errors.T
