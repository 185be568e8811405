"""Looks token ids up in a table. Knows nothing of vocabularies' meaning."""

from __future__ import annotations

from torch import Tensor


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Looks tokens up: (tokens,) int64 and (vocab, hidden) -> (tokens, hidden)."""
    return table.index_select(0, tokens)
