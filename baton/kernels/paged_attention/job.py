"""Describes what one call of the reference attention reads: some query rows and the blocks of their sequences.

Knows nothing of sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionJob(NamedTuple):
    """Sequences of the same shape that are attended to together."""

    first: int  # index of the first query row; rows are ordered by sequence
    batch: int  # sequences
    queries: int  # rows of each sequence
    blocks: tuple[Tensor, ...]  # by layer: (2 x batch x blocks,) int64, indices of K blocks, then of V blocks
    mask: Tensor  # (batch, 1, queries, 16 x blocks), 0 or -inf, added to the scores
