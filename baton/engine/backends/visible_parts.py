"""Computes which pages each of a step's tokens sees if not all, as block tables that attention reads in order.

Knows nothing of models or of kernels, and is torch-free. Attention sees one table of pages and masks what is
after a query's place in it. Blocks that aren't seen are therefore left out of the table, and the query's place
counts those that remain; its rotary angle stays that of its position in the text:

    blocks of the text      0 1 | 2 3 4 5 6 | 7 8 9 | 10 (the query's own run)
    sinks of 2, window of 3  x x               x x x   x        table 0 1 7 8 9 10, place 5 x 16 + …

Blocks that a prompt's end didn't select (SnapKV) form a gap in the table, after which all of an item's tokens are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.engine.plan import SequenceStep
from baton.kv.layout.selection import Selection
from baton.protos.nouns import BLOCK_TOKENS


class VisiblePart(NamedTuple):
    """Some rows of an item, beginning with its row ``first``, and what they see."""

    first: int
    queries: int  # number of rows
    pages: Sequence[int]  # block table, of 16 tokens each
    start: int  # place of the first row in this table


def visible_parts(item: SequenceStep, selection: Selection | None) -> Iterator[VisiblePart]:
    """Yields the item's rows, in order, in parts that see the same pages: those that see all before them, then one
    part per run of 16.
    """
    if selection is None:
        yield _behind_gap(item)
        return
    at, end, sunk = item.start, item.start + len(item.tokens), selection.sinks // BLOCK_TOKENS
    whole = sunk + selection.window // BLOCK_TOKENS + 1  # runs whose tokens see all before them
    while at < end:
        run = at // BLOCK_TOKENS
        if run < whole:
            stop = min(end, whole * BLOCK_TOKENS)
            pages, start = item.pages[: -(-stop // BLOCK_TOKENS)], at
        else:
            stop, first = min(end, (run + 1) * BLOCK_TOKENS), selection.first_run(run)
            pages, start = [*item.pages[:sunk], *item.pages[first : run + 1]], at - (first - sunk) * BLOCK_TOKENS
        yield VisiblePart(at - item.start, stop - at, pages, start)
        at = stop


def _behind_gap(item: SequenceStep) -> VisiblePart:
    first, end = item.gap
    pages = [*item.pages[:first], *item.pages[end:]] if end > first else item.pages
    return VisiblePart(0, len(item.tokens), pages, item.start - (end - first) * BLOCK_TOKENS)
