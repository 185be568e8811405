"""Mamba's selective scan, natively on a CPU. Knows nothing of where states lie or of how rows were projected.

Each sequence has the same bits whatever else is computed beside it, and however it is cut into steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.abi import native
from baton.kernels.abi.native import I64, P
from baton.kernels.selective_scan import reference


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, fade: Tensor, skip: Tensor, state: Tensor
) -> Tensor:
    """Does what ``reference.selective_scan`` does; a sequence's states must be contiguous float32."""
    if native.library() is None:
        return reference.selective_scan(x, dt, b, c, fade, skip, state)
    fed = [each.contiguous() for each in (x, dt, b, c, fade, skip)]
    sequences, channels, size = state.shape
    assert state.stride()[1:] == (size, 1), "the states of a sequence lie side by side"
    out = torch.empty_like(fed[0])
    call = native.function("selective_scan", *[P] * 7, *[I64] * 5, P)
    sizes = state.stride(0), sequences, len(x) // sequences, channels, size
    call(*(each.data_ptr() for each in fed), state.data_ptr(), *sizes, out.data_ptr())
    return out
