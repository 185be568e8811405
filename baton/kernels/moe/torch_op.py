"""Defines torch.ops.baton.moe, a layer of experts. Knows nothing of models."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton.kernels.abi.native import I64, P
from baton.kernels.abi.torch_library import define, dense, require, runs_natively, symbol
from baton.kernels.moe import reference
from baton.kernels.moe.native import Experts


def _fake(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, chosen: int, renormalise: bool) -> Tensor:
    experts, hidden, inner = down.shape
    require(gate_up.shape == (experts, 2 * inner, hidden), "moe: gate_up is (experts, 2 inner, hidden)")
    require(x.dim() == 2 and x.shape[1] == hidden, f"moe: x is (rows, {hidden})")
    require(logits.shape == (x.shape[0], experts), "moe: logits are (rows, experts)")
    require(0 < chosen <= experts, f"moe: chosen is 1 to {experts}")
    return x.new_empty(x.shape)


@define("moe(Tensor x, Tensor logits, Tensor gate_up, Tensor down, int chosen, bool renormalise) -> Tensor", _fake)
def moe(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, chosen: int, renormalise: bool) -> Tensor:
    """Returns the weighted sum of the chosen experts' outputs, (rows, hidden).

    x is (rows, hidden), logits (rows, experts), weights as in ``native.Experts``. Raises ValueError for shapes that
    don't fit.
    """
    call, out = symbol("moe", P, P, I64, P, I64, P, I64), _fake(x, logits, gate_up, down, chosen, renormalise)
    known = gate_up.dtype == down.dtype in (torch.bfloat16, torch.float32)
    if call is None or not runs_natively(x, logits) or not known:
        return out.copy_(reference.moe(x, logits, gate_up, down, chosen, renormalise))
    struct = Experts(gate_up.contiguous(), down.contiguous(), chosen, renormalise)
    rows, asked = dense(x), logits.contiguous()
    c = struct.struct
    call(
        ctypes.byref(c), rows.data_ptr(), rows.stride(0), asked.data_ptr(), len(rows), out.data_ptr(), out.stride(0)
    )
    return out
