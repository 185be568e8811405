"""Copies of busy experts: what no placement may do, and how even it makes the ranks' loads."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.backends.ranks.balancing import ExpertBalancer
from baton.engine.backends.ranks.placement import EMPTY, SHARES, Placement, changed, home_ranks, place

ROWS = st.lists(st.integers(0, 5000), min_size=2, max_size=40)


def computed_where_held(placed: Placement, experts: int) -> bool:
    """Returns whether each row of each expert is computed by one rank that has the expert."""
    homes = home_ranks(experts, len(placed.held))
    return all(
        rank == homes[expert] or expert in placed.held[rank]
        for expert in range(experts)
        for rank in placed.shares(expert)
    )


@settings(max_examples=25, deadline=None)
@given(ROWS, ROWS, st.integers(2, 6), st.integers(0, 4))
def test_no_expert_is_lost_and_no_rank_gets_busier_than_without_copies(
    rows: list[int], later: list[int], ranks: int, spare: int
) -> None:
    experts = max(len(rows), ranks)
    placed = home = Placement.at_home(experts, ranks, spare)
    for loads in (rows, later):  # the second placement begins with the first one's copies
        loads = (loads * experts)[:experts]
        placed = place(loads, spare, before := placed)
        assert computed_where_held(placed, experts)
        assert all(sum(placed.shares(expert).values()) == SHARES for expert in range(experts))
        assert all(len(held) == spare for held in placed.held)
        assert sum(placed.loads(loads)) == pytest.approx(sum(loads))
        assert max(placed.loads(loads)) <= max(home.loads(loads))
        kept = [{*old} & {*new} for old, new in zip(before.held, placed.held, strict=True)]
        assert len(changed(before, placed)) == sum(
            len({*new} - same - {EMPTY}) for new, same in zip(placed.held, kept, strict=True)
        )


@settings(max_examples=25, deadline=None)
@given(ROWS, st.integers(2, 6))
def test_with_places_for_all_ranks_differ_by_a_sixteenth_of_the_busiest_expert_at_most(
    rows: list[int], ranks: int
) -> None:
    rows = (rows * ranks)[: max(len(rows), ranks)]
    loads = place(rows, len(rows), Placement.at_home(len(rows), ranks, len(rows))).loads(rows)
    assert max(loads) - min(loads) <= max(rows) / SHARES


def test_one_place_on_each_of_two_ranks_halves_a_hot_expert() -> None:
    placed = place(rows := [1000, 0, 0, 0], 1, Placement.at_home(4, 2, 1))
    assert placed.held == ((EMPTY,), (0,))
    assert placed.shares(0) == {0: 8, 1: 8}
    assert {placed.owners[row] for row in range(2)} == {0, 1}  # of consecutive rows each copy gets some
    assert placed.copies() == 1
    assert placed.loads(rows) == [500, 500]


def test_many_experts_on_many_ranks_come_out_nearly_even_with_two_places_each() -> None:
    draw = random.Random(1)
    rows = [int(1000 * draw.paretovariate(1.1)) for _ in range(128)]
    home = Placement.at_home(128, 8, 2)
    loads, even = place(rows, 2, home).loads(rows), sum(rows) / 8
    assert max(home.loads(rows)) > 1.9 * even
    assert max(loads) < 1.02 * even


def test_a_layer_changes_where_that_is_worth_it_and_one_per_step() -> None:
    rows = np.zeros((3, 4), np.int64)
    balancer = ExpertBalancer(lambda: rows.copy(), ranks=2, spare=1, look_rows=100)
    assert balancer.due(100) is None  # nothing has been computed
    rows += np.array([[900, 0, 50, 50], [25, 25, 25, 25], [0, 0, 100, 300]])
    layers = []
    for _ in range(4):
        if (note := balancer.due(10)) is not None:
            balancer.placed(note)
            layers.append(note.layer)
    assert layers == [0, 2]
    assert (balancer.copies.copies, balancer.copies.moves) == (2, 2)
    before = balancer.copies.imbalance
    rows += np.array([[900, 0, 50, 50], [25, 25, 25, 25], [0, 0, 100, 300]])
    assert [balancer.due(100) for _ in range(4)] == [None] * 4  # these are the loads that it was placed for
    assert balancer.copies.imbalance < 1.05 < 1.5 < before == balancer.copies.imbalance_at_home
