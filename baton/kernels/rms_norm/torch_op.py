"""Defines torch.ops.baton.rms_norm, which adds the residual and normalizes. Knows nothing of layers."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.abi.native import I64, F, P
from baton.kernels.abi.torch_library import address, define, require, runs_natively, symbol
from baton.kernels.rms_norm import reference


def _fake(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    require(x.dim() == 2 and weight.shape == x.shape[1:], "rms_norm takes x (rows, hidden) and a weight (hidden,)")
    require(delta is None or delta.shape == x.shape, "rms_norm: delta has the shape of x")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define("rms_norm(Tensor(a!) x, Tensor? delta, Tensor weight, float eps) -> Tensor", _fake)
def rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds delta to x (rows, hidden) in place; returns the RMS norm of that sum times ``weight``, (rows,
    hidden).
    """
    call, out = symbol("rms_norm", P, P, P, F, I64, I64, P), _fake(x, delta, weight, eps)
    if call is None or not runs_natively(x, delta, weight) or not x.is_contiguous():
        if delta is not None:
            x.add_(delta)
        return out.copy_(reference.normed(x, weight, eps))
    sent, scale = None if delta is None else delta.contiguous(), weight.contiguous()
    call(x.data_ptr(), address(sent), scale.data_ptr(), eps, *x.shape, out.data_ptr())
    return out
