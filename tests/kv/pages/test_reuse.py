"""Tests what is learned of reuse, held against the obvious computation."""

from __future__ import annotations

import numpy as np
import pytest

from baton.kv.pages.reuse import BINS, CLASSES, PageHistory, ReuseTable, bin_of, bins_of, gittins


def obvious(hazard, start):
    """The best uses per time over every stop, one half-octave after the other."""
    widths = [max(0.4, 2 ** ((i + 1) / 2) - 2 ** (i / 2)) for i in range(len(hazard))]
    best, here, uses, time = 0.0, 1.0, 0.0, 0.0
    for i in range(start, len(hazard)):
        uses += here * hazard[i]
        time += here * (1 - hazard[i] / 2) * widths[i]
        here *= 1 - hazard[i]
        best = max(best, uses / time)
    return best


def test_worth_is_the_best_ratio_over_every_age_until_which_a_page_could_be_kept():
    hazard = np.random.default_rng(3).random((2, 12)) * 0.4
    found = gittins(hazard)
    for row in range(2):
        assert found[row] == pytest.approx([obvious(hazard[row], start) for start in range(12)])


def test_with_nothing_learned_the_older_page_is_worth_less_and_the_used_one_more():
    table = ReuseTable(64)
    unused, used = table.worth(0, [table.class_of(PageHistory()), table.class_of(PageHistory(1, 1))])
    watched = bin_of(table.horizon)
    assert (np.diff(unused[:watched]) < 0).all()
    assert (used[:watched] > unused[:watched]).all()


def test_pages_that_come_back_at_a_distance_are_worth_more_before_it_than_behind_it():
    table, cls = ReuseTable(1000), 0
    for at in range(0, 40_000, 100):
        table.joined(cls, at, 10)
        table.used(cls, at, at + 500, 10)
    (worth,) = table.worth(40_000, [cls])
    assert worth[bin_of(450)] > 5 * worth[bin_of(900)]


def test_pages_that_are_never_used_again_lower_the_worth_of_their_like():
    table = ReuseTable(1000)
    dead, alive = table.class_of(PageHistory()), table.class_of(PageHistory(2, 2))
    for at in range(0, 40_000, 100):
        table.joined(dead, at, 10)
        table.joined(alive, at, 10)
        table.used(alive, at, at + 500, 10)
    worth = table.worth(40_000, [dead, alive])
    assert worth[0, bin_of(100)] < worth[1, bin_of(100)] / 5


def test_classes_and_half_octaves_stay_in_their_tables():
    table = ReuseTable(1)
    assert table.class_of(PageHistory(99, 99, 1 << 40, True)) == CLASSES - 1
    assert bin_of(0) == 0
    assert bin_of(1 << 60) == BINS - 1
    ages = np.array([0, 1, 2, 3, 100, 12345, 1 << 40])
    assert bins_of(ages).tolist() == [bin_of(int(age)) for age in ages]
