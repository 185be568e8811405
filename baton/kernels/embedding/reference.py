"""Looks token ids up in an embedding table. Knows nothing of vocabularies' meaning."""

from __future__ import annotations

from torch import Tensor


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Returns the rows of ``table`` (vocab, hidden) for ``tokens`` (tokens,) int64, as (tokens, hidden)."""
    return table.index_select(0, tokens)
