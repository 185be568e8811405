"""Says which pages each of a step's tokens sees where not all are, as tables that attention can read in order.

Knows nothing of models or of kernels, and is torch-free. Attention sees one table of pages and hides what lies
behind a query's place in it. Blocks that nobody sees are therefore left out of the table, and the query's place
counts those that are left; its rotary angle stays that of its place in the text:

    blocks of the text      0 1 | 2 3 4 5 6 | 7 8 9 | 10 (the query's own run)
    sinks of 2, window of 3  x x               x x x   x        table 0 1 7 8 9 10, place 5 x 16 + …

What a prompt's end chose of it leaves a gap of its own, which all of an item's tokens are behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.engine.plan import SequenceStep
from baton.kv.layout.selection import Selection
from baton.protos.nouns import BLOCK_TOKENS


class SeenPart(NamedTuple):
    """Holds some rows of an item, from its row ``first`` on: ``pages`` of 16 tokens, and the first row's place."""

    first: int
    queries: int
    pages: Sequence[int]
    start: int


def seen_parts(item: SequenceStep, selection: Selection | None) -> Iterator[SeenPart]:
    """Yields the item's rows in order: first those that see all before them, then run by run."""
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
        yield SeenPart(at - item.start, stop - at, pages, start)
        at = stop


def _behind_gap(item: SequenceStep) -> SeenPart:
    first, end = item.gap
    pages = [*item.pages[:first], *item.pages[end:]] if end > first else item.pages
    return SeenPart(0, len(item.tokens), pages, item.start - (end - first) * BLOCK_TOKENS)
