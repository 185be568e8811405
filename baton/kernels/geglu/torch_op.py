"""Defines torch.ops.baton.geglu, Gemma's gated activation. Knows nothing of weights."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.abi.native import I64, P
from baton.kernels.abi.torch_library import define, require, runs_natively, symbol
from baton.kernels.geglu import reference


def _fake(gate_up: Tensor) -> Tensor:
    require(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, "geglu takes (rows, 2 x inner), gate first")
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@define("geglu(Tensor gate_up) -> Tensor", _fake)
def geglu(gate_up: Tensor) -> Tensor:
    """Returns gelu(gate) x up, (rows, inner), for ``gate_up`` (rows, 2 x inner), gate first."""
    call, out = symbol("geglu", P, I64, I64, P), _fake(gate_up)
    if call is None or not runs_natively(gate_up):
        return out.copy_(reference.geglu(gate_up))
    whole = gate_up.contiguous()
    call(whole.data_ptr(), *out.shape, out.data_ptr())
    return out
