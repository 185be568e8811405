"""Intervals hold what they should, and are the same each time."""

from __future__ import annotations

import numpy as np
import pytest

from baton.evaluate.intervals import mean_interval, ratio_interval, share_interval


def test_ninety_five_of_a_hundred_intervals_hold_the_true_mean() -> None:
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(40):
        low, high = mean_interval(rng.exponential(2.0, 80).tolist())
        held += low <= 2.0 <= high
    assert 33 <= held <= 40


def test_a_ratio_of_sums_is_drawn_by_pairs() -> None:
    sizes = [10.0, 20.0, 400.0]
    assert ratio_interval([3 * size for size in sizes], sizes) == (3.0, 3.0)


def test_the_same_values_give_the_same_interval() -> None:
    values = [1.0, 2.0, 5.0, 9.0]
    assert mean_interval(values) == mean_interval(values)


def test_a_share_of_nothing_and_of_everything_has_room_on_the_other_side() -> None:
    low, high = share_interval(0, 20)
    assert low == 0
    assert 0.1 < high < 0.2
    assert share_interval(20, 20)[0] == pytest.approx(1 - high)
    assert share_interval(0, 0) == (0.0, 1.0)
