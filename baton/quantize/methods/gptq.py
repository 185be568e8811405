"""GPTQ (https://arxiv.org/abs/2210.17323): rounds input by input, and lets later inputs compensate for the error.

Knows nothing of files. Inputs are taken in the order of falling second moments (act-order). Groups are neighbours
in the file's order, whose scales are found beforehand; with ``regroup`` groups follow the new order instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.protos.errors import ConfigError
from baton.quantize.grids import Fit, IntGrid
from baton.quantize.quantized_weight import QuantizedWeight, group_numbers, stacked

BLOCK = 128  # inputs whose errors are spread at once
ROWS = 1024  # rows that are rounded at once, which bounds what lies beside the weight
DAMP = 0.01  # of the mean second moment, added to each: the paper's


def gptq(
    weight: Tensor, hessian: Tensor, grid: IntGrid, act_order: bool = True, regroup: bool = False
) -> QuantizedWeight:
    """Returns a weight (n, k) rounded for the least output error under ``hessian`` (k, k), the mean of x xᵀ.

    Beside both, memory holds one more (k, k) and ROWS rows.
    """
    k = weight.shape[1]
    moments = hessian.diagonal()
    order = torch.argsort(moments, descending=True, stable=True) if act_order else torch.arange(k)
    groups = group_numbers(k, grid.group)
    of = groups[torch.argsort(order)] if regroup else groups
    root, found = _reversed_root(hessian, order), list[QuantizedWeight]()
    for at in range(0, len(weight), ROWS):
        ordered = weight[at : at + ROWS, order]
        fitted = (ordered, moments[order]) if regroup else (weight[at : at + ROWS], moments)
        fit = grid.fit(*fitted)
        q = _rounds(ordered, root, grid, fit, of[order])
        found.append(grid.finish(q[:, torch.argsort(order)], fit))
    whole = stacked(found)
    return whole._replace(groups_of=of) if regroup and grid.group else whole


def _rounds(weight: Tensor, root: Tensor, grid: IntGrid, fit: Fit, of: Tensor) -> Tensor:
    """Returns the rounded integers (uint8), input by input in the given order; ``weight`` is overwritten."""
    assert fit.zeros is not None
    k = weight.shape[1]
    q = torch.empty(weight.shape, dtype=torch.uint8)
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        scales, zeros = fit.scales[:, of[start:end]], fit.zeros[:, of[start:end]]
        factors = _factors(root, k - start, end - start)
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


def _reversed_root(hessian: Tensor, order: Tensor) -> Tensor:
    """Returns the lower Cholesky factor (k, k) of the Hessian with its inputs in the reverse of ``order``.

    It is damped as much as that needs. Raises ConfigError if the Hessian isn't finite.
    """
    if not bool(hessian.diagonal().isfinite().all()):
        text = "the model's activations on the calibration text are NaN or infinite"
        raise ConfigError(f"{text}; use another --calibration or --model", "calibration")
    place, k = order.flip(0), len(order)
    damp = DAMP * hessian.diagonal().double().mean().item() or 1.0
    for _ in range(8):
        matrix, failed = torch.empty(k, k), torch.empty((), dtype=torch.int32)
        for at in range(0, k, BLOCK):
            matrix[at : at + BLOCK] = hessian[place[at : at + BLOCK]][:, place]
        matrix.diagonal().add_(damp).masked_fill_(hessian.diagonal()[place] <= 0, 1.0)
        root = matrix.T  # column by column, as LAPACK has it, so that nothing is copied
        torch.linalg.cholesky_ex(root, out=(root, failed))
        if not failed:
            break
        damp *= 10
    return root


def _factors(root: Tensor, left: int, count: int) -> Tensor:
    """Returns the first ``count`` rows of the upper Cholesky factor (left, left) of the inverse Hessian.

    The Hessian is that of the last ``left`` inputs. Reversing rows and columns of ``root`` gives an upper factor R
    with H = R Rᵀ; that factor is the inverse of R.
    """
    unit = torch.zeros(count, left)
    unit[range(count), range(left - 1, left - 1 - count, -1)] = 1.0
    return torch.linalg.solve_triangular(root[:left, :left], unit, upper=False, left=False).flip(1)
