"""Which blocks a sliding attention window reaches. Knows nothing of pages."""

from __future__ import annotations


def first_seen(tokens: int, window: int, block_tokens: int) -> int:
    """Returns the index of the first block that the token at position ``tokens`` attends to, with a window of
    ``window`` tokens, itself included; 0 if ``window`` is 0.
    """
    return max(0, tokens - window + 1) // block_tokens if window else 0


def growth(end: int, first: int, blocks: int, most: int, shared: int = 0) -> int:
    """Returns how many more pages, until it has ``most`` at once, a table with those of blocks ``first`` to ``end``
    may have while it grows to ``blocks`` blocks.

    ``shared`` of its pages have another lease, too: given back, they don't become available.
    """
    return max(0, min(most + shared - (end - first), blocks - end))
