"""Describes what one call of attention reads: which query rows against which blocks. Knows nothing of
sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionJob(NamedTuple):
    """Holds ``batch`` sequences with ``queries`` rows each; rows start at ``first`` and lie sequence by sequence.

    ``blocks[layer]`` (2 x batch x blocks,) int64 names the K blocks, then the V blocks, in ``kv_blocks``. ``mask``
    (batch, 1, queries, 16 x blocks) is added to the scores: 0 or -inf.
    """

    first: int
    batch: int
    queries: int
    blocks: tuple[Tensor, ...]
    mask: Tensor
