"""Rows dealt among ranks and into parts: every row once, in order, and as much to do for each."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.backends.ranks.dealing import GRAIN, LEAST_PART, Piece, among_ranks, in_parts
from baton.engine.backends.ranks.runner import cut
from baton.kernels.step.structs import ITEM

ITEMS = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 900)), min_size=1, max_size=8)


def rows_of(pieces: tuple[Piece, ...], count: int) -> list[list[int]]:
    """Each item's rows as its pieces have them, in the pieces' order."""
    found: list[list[int]] = [[] for _ in range(count)]
    for piece in pieces:
        assert piece.rows > 0
        found[piece.item] += range(piece.first, piece.first + piece.rows)
    return found


@given(items=ITEMS, ranks=st.integers(1, 8))
def test_each_row_is_one_ranks_and_a_page_is_written_by_one(items: list[tuple[int, int]], ranks: int) -> None:
    starts, counts = zip(*items, strict=True)
    pieces = among_ranks(starts, counts, ranks)
    assert rows_of(pieces, len(items)) == [list(range(count)) for count in counts]
    for piece in pieces:
        assert 0 <= piece.owner < ranks
        begin = starts[piece.item] + piece.first
        assert piece.first == 0 or begin % GRAIN == 0


@given(start=st.integers(0, 30_000), count=st.integers(512, 4096), ranks=st.integers(2, 8))
def test_ranks_attend_to_as_many_keys_as_one_another(start: int, count: int, ranks: int) -> None:
    keys, rows = [0] * ranks, [0] * ranks
    for piece in among_ranks([start], [count], ranks):
        rows[piece.owner] += piece.rows
        keys[piece.owner] += sum(range(start + piece.first, start + piece.first + piece.rows))
    grain = 2 * GRAIN  # rows by which a rank's two pieces may be longer or shorter
    assert max(rows) - min(rows) <= 2 * grain
    assert max(keys) - min(keys) <= 2 * grain * (start + count)


@given(starts=st.lists(st.integers(0, 900), min_size=1, max_size=40), ranks=st.integers(1, 8))
def test_a_batch_of_answers_is_dealt_evenly(starts: list[int], ranks: int) -> None:
    owners = [piece.owner for piece in among_ranks(starts, [1] * len(starts), ranks)]
    loads = [owners.count(rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= 1


@given(counts=st.lists(st.integers(1, 900), min_size=1, max_size=8), ranks=st.integers(1, 6))
def test_parts_follow_one_another_and_are_as_long(counts: list[int], ranks: int) -> None:
    pieces = in_parts(counts, ranks)
    assert rows_of(pieces, len(counts)) == [list(range(count)) for count in counts]
    owners = [piece.owner for piece in pieces]
    assert owners == sorted(owners)
    assert set(owners) == set(range(owners[-1] + 1)), "no part is empty"
    rows = [sum(piece.rows for piece in pieces if piece.owner == part) for part in range(owners[-1] + 1)]
    assert max(rows) - min(rows) <= 1
    assert len(rows) == 1 or min(rows) >= LEAST_PART


def test_items_are_cut_where_the_pieces_say() -> None:
    items = np.array([(0, 4096, 40, 100), (40, 8192, 1, 7)], ITEM)
    found = cut(items, [Piece(0, 0, 12, 1), Piece(0, 12, 28, 0), Piece(1, 0, 1, 0)])
    assert found.tolist() == [(0, 4096, 12, 100), (12, 4096, 28, 112), (40, 8192, 1, 7)]
