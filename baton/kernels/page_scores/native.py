"""Computes how much attention one token pays to each run of 16 that it sees, natively, from stored keys.

Knows nothing of sequences. A row has the same bits whatever else is computed beside it.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from baton.kernels.abi import native
from baton.kernels.abi.native import I64, F, P
from baton.kernels.step.structs import PagedKv


def add_row_scores(
    kv: PagedKv, pages: Tensor, tokens: int, q: Tensor, scale: float, softcap: float, scores: Tensor
) -> None:
    """Adds to ``scores`` what the heads of ``q`` pay to each run of 16 tokens, the last one's own included.

    q (heads, head_dim) float32 is that of the last of ``tokens`` tokens, rotated; their keys are on ``pages``
    (int32) of the layer of ``kv``. ``scores`` (tokens / 16, rounded up, or more) is contiguous float32.
    """
    assert scores.is_contiguous()
    call = native.function("page_scores", P, P, I64, P, I64, F, F, P)
    rows = q.contiguous()
    call(
        ctypes.addressof(kv),
        pages.data_ptr(),
        tokens,
        rows.data_ptr(),
        len(rows),
        scale,
        softcap,
        scores.data_ptr(),
    )
