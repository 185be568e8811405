"""Rows before they are rotated, natively on a CPU. Knows nothing of pages."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.abi import native
from baton.kernels.abi.native import I64, F, P
from baton.kernels.halve_heads import reference


def halve_heads(x: Tensor, heads: int, width: int, paired: int) -> Tensor:
    """Does what ``reference.halve_heads`` does; torch computes it in other dtypes than float32."""
    if not _is_native(x):
        return reference.halve_heads(x, heads, width, paired)
    out, call = torch.empty_like(x), native.function("halve_heads", P, *[I64] * 5, P)
    call(x.data_ptr(), *x.shape, heads, width, paired, out.data_ptr())
    return out


def temper_queries(x: Tensor, queries: int, start: int, scale: float, floor: float, shift: int) -> None:
    """Does what ``reference.temper_queries`` does, with the same bits for a position whatever is beside it."""
    if not _is_native(x):
        reference.temper_queries(x, queries, start, scale, floor, shift)
        return
    call = native.function("temper_queries", P, I64, I64, I64, I64, F, F, I64)
    call(x.data_ptr(), *x.shape, queries, start, scale, floor, shift)


def _is_native(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and native.library() is not None
