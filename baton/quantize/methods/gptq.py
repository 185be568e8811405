"""GPTQ (https://arxiv.org/abs/2210.17323): rounds input by input, and lets later inputs compensate for the error.

Knows nothing of files. Inputs are taken in the order of falling second moments (act-order). Groups are neighbours
in the file's order, whose scales are found beforehand; with ``regroup`` groups follow the new order instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.quantize.grids import Fit, IntGrid
from baton.quantize.quantized_weight import QuantizedWeight, group_numbers

BLOCK = 128  # inputs whose errors are spread at once
DAMP = 0.01  # of the mean second moment, added to each: the paper's


def gptq(
    weight: Tensor, hessian: Tensor, grid: IntGrid, act_order: bool = True, regroup: bool = False
) -> QuantizedWeight:
    """Returns a weight (n, k) rounded for the least output error under ``hessian`` (k, k), the mean of x xᵀ."""
    k = weight.shape[1]
    moments = hessian.diagonal()
    order = torch.argsort(moments, descending=True, stable=True) if act_order else torch.arange(k)
    turned = weight[:, order] if regroup else weight
    fit = grid.fit(turned.contiguous(), moments[order] if regroup else moments)
    of = group_numbers(k, grid.group)[torch.argsort(order)] if regroup else group_numbers(k, grid.group)
    q = _rounds(weight[:, order].clone(), hessian[order][:, order], grid, fit, of[order])
    found = grid.finish(q[:, torch.argsort(order)].contiguous(), fit)
    return found._replace(groups_of=of) if regroup and grid.group else found


def _rounds(weight: Tensor, hessian: Tensor, grid: IntGrid, fit: Fit, of: Tensor) -> Tensor:
    """Returns the rounded integers, input by input in the given order; ``weight`` is overwritten."""
    assert fit.zeros is not None
    factors, k = _factors(hessian), weight.shape[1]
    q = torch.empty(weight.shape)
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        scales, zeros = fit.scales[:, of[start:end]], fit.zeros[:, of[start:end]]
        rows = factors[start:end, start:end]
        q[:, start:end], errors = _block(weight[:, start:end], rows, scales, zeros, grid.top)
        weight[:, end:] -= errors @ factors[start:end, end:]
    return q.to(torch.int32)


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


def _factors(hessian: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the inverse Hessian, with as much damping as that needs."""
    moments = hessian.double()
    dead = moments.diagonal() <= 0
    moments[dead, dead] = 1.0
    damp = DAMP * moments.diagonal().mean()
    for _ in range(8):
        root, failed = torch.linalg.cholesky_ex(moments + damp * torch.eye(len(moments), dtype=torch.float64))
        if not failed:
            break
        damp *= 10
    return torch.linalg.cholesky(torch.cholesky_inverse(root), upper=True).float()
