"""Costs of steps by their rows: learned from steps that were run, and between, beyond and after them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.engine.speculate.row_cost import REMEMBERED, RENEW, STALE, RowCost
from tests.engine.speculate.world import steep


def test_costs_are_learned_between_and_beyond_what_was_seen() -> None:
    costs, rng = RowCost(), random.Random(2)
    for _ in range(400):
        rows = rng.choice([1, 2, 4, 8, 12, 16])
        costs.observe(rows, steep(rows) * rng.uniform(0.97, 1.03))
    found = costs.seconds(1, 19)
    assert found[[0, 3, 7, 11, 15]] == pytest.approx([steep(r) for r in (1, 4, 8, 12, 16)], rel=0.05)
    assert (np.diff(found) >= 0).all()
    assert found[19] > steep(16)


def test_costs_follow_a_machine_that_slows_down_whatever_rows_it_runs() -> None:
    costs = RowCost()
    for _ in range(50):
        for rows in (1, 8):
            costs.observe(rows, steep(rows))
    for _ in range(300):
        costs.observe(8, steep(8, speed=2.0))
    assert costs.seconds(1, 7)[[0, 7]] == pytest.approx([steep(1, 2.0), steep(8, 2.0)], rel=0.15)


def test_a_hiccup_makes_no_number_of_rows_untouchable() -> None:
    costs = RowCost()
    for _ in range(20):
        costs.observe(1, steep(1))
        costs.observe(3, steep(3))
    costs.observe(2, 50 * steep(2))
    assert costs.seconds(1, 1)[1] < 1.3 * steep(2)


def test_one_step_that_was_slow_by_chance_keeps_no_others_of_as_many_rows_away_for_long() -> None:
    costs = RowCost()
    for _ in range(20):
        costs.observe(4, steep(4))
        costs.observe(16, steep(16))
    costs.observe(8, 1.8 * steep(8))
    assert costs.seconds(4, 4)[4] > 1.5 * steep(8)
    for _ in range(REMEMBERED + RENEW):
        costs.observe(16, steep(16))
    assert costs.seconds(4, 4)[4] == pytest.approx(steep(8), rel=0.05)


def test_the_fewest_rows_are_never_forgotten_because_drafts_are_weighed_against_them() -> None:
    costs = RowCost()
    costs.observe(4, steep(4))
    for _ in range(STALE + RENEW):
        costs.observe(16, steep(16))
    assert costs.seconds(4, 12)[[0, 12]] == pytest.approx([steep(4), steep(16)], rel=0.05)


def test_between_two_numbers_of_rows_costs_are_on_a_straight_line() -> None:
    costs = RowCost()
    costs.observe(4, 10e-3)
    costs.observe(40, 18e-3)
    assert costs.seconds(4, 18)[18] == pytest.approx(14e-3, rel=0.01)


def test_what_once_seemed_too_expensive_is_tried_again() -> None:
    costs = RowCost()
    for _ in range(20):
        costs.observe(1, steep(1))
    for _ in range(20):
        costs.observe(2, 9 * steep(2))
    assert costs.seconds(1, 1)[1] > 2 * steep(2)
    for _ in range(2 * STALE):
        costs.observe(1, steep(1))
    assert costs.seconds(1, 1)[1] < 1.3 * steep(2)
