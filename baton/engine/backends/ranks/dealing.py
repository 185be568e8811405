"""Divides the rows of a step: among ranks with equal work, or into consecutive parts.

Knows nothing of ranks' processes. A prompt's later rows attend to more keys. If it is cut into twice as many pieces
as there are ranks, and a rank's second piece is as far from the end as its first from the beginning, all have the
same work
(https://arxiv.org/abs/2411.01783).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

GRAIN = 16  # rows; pieces begin at multiples, so that kernels' blocks of rows are full and each page has one writer
LEAST_PART = 64  # least rows of a part, because each part reads a rank's weights again
PARTS_PER_RANK = 4  # at most; a rank idles for (ranks - 1) / (parts + ranks - 1) of the time


class Piece(NamedTuple):
    """Rows ``first`` to ``first + rows - 1``, counted within the item, of item ``item``. ``owner`` is a rank or a
    part.
    """

    item: int
    first: int
    rows: int
    owner: int


def among_ranks(starts: Sequence[int], counts: Sequence[int], ranks: int) -> tuple[Piece, ...]:
    """Returns the pieces of a step and the ranks that compute them. Item i has ``counts[i]`` rows, the first at
    position ``starts[i]``.
    """
    load, found = [0] * ranks, list[Piece]()
    for item, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if count >= 2 * ranks * GRAIN:
            pieces = list(_folded(item, start, count, ranks))
        else:
            pieces = [Piece(item, 0, count, load.index(min(load)))]
        for piece in pieces:
            load[piece.owner] += piece.rows
        found += pieces
    return tuple(found)


def _folded(item: int, start: int, count: int, ranks: int) -> Iterator[Piece]:
    cuts = [_grained(start, count, at, 2 * ranks) for at in range(2 * ranks + 1)]
    for at, (begin, end) in enumerate(pairwise(cuts)):
        yield Piece(item, begin, end - begin, min(at, 2 * ranks - 1 - at))


def _grained(start: int, count: int, at: int, pieces: int) -> int:
    """Returns where piece ``at`` begins: at a position that is a multiple of GRAIN, except at the ends."""
    if at in (0, pieces):
        return count * at // pieces
    return max(0, (start + count * at // pieces) // GRAIN * GRAIN - start)


def in_parts(counts: Sequence[int], ranks: int) -> tuple[Piece, ...]:
    """Returns the pieces of a step, in order, and their parts, from 0 on, which have about equally many rows
    each.
    """
    total = sum(counts)
    parts = max(1, min(total // LEAST_PART, PARTS_PER_RANK * ranks))
    found, at = list[Piece](), 0
    for item, count in enumerate(counts):
        for begin, end in _cut(at, at + count, [total * part // parts for part in range(1, parts)]):
            found.append(Piece(item, begin - at, end - begin, _part_of(begin, total, parts)))
        at += count
    return tuple(found)


def in_one_part(counts: Sequence[int]) -> tuple[Piece, ...]:
    """Returns the whole items of a step as its only part: one stage after the other runs all rows."""
    return tuple(Piece(item, 0, count, 0) for item, count in enumerate(counts))


def _cut(begin: int, end: int, cuts: Iterable[int]) -> Iterator[tuple[int, int]]:
    for cut in cuts:
        if begin < cut < end:
            yield begin, cut
            begin = cut
    yield begin, end


def _part_of(row: int, total: int, parts: int) -> int:
    return max(part for part in range(parts) if total * part // parts <= row)
