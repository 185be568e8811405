"""Gaps between tokens are counted once, and found in the histogram and in the live figures as if counted twice."""

import random
from bisect import bisect_left

import pytest

from baton.cluster.metering.metrics import SECONDS
from baton.router.observe.gaps import Gaps, cells_of, sort_into
from baton.router.observe.live import Bins, bin_of


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_gap_is_in_the_bucket_and_the_bin_that_it_belongs_to(spread: float) -> None:
    rng, gaps, bins = random.Random(5), Gaps(), Bins()
    buckets, by_bin, total = [0] * (len(SECONDS) + 1), Bins(), 0.0
    for _ in range(4000):
        tokens, each = rng.randrange(1, 5), min(3000.0, rng.lognormvariate(-4, spread))
        gaps.count(each * tokens, tokens)
        buckets[bisect_left(SECONDS, each)] += tokens
        by_bin[bin_of(each)] = by_bin.get(bin_of(each), 0) + tokens
        total += each * tokens
    found, seconds = gaps.drain(bins)
    assert [found.get(at, 0) for at in range(len(buckets))] == buckets
    assert bins == by_bin
    assert seconds == pytest.approx(total)
    assert gaps.drain(bins) == ({}, 0.0)


def test_a_bound_is_the_buckets_last_value_and_odd_gaps_find_a_place() -> None:
    for value, bucket in [(bound, at) for at, bound in enumerate(SECONDS)] + [(0.0, 0), (1e-9, 0), (1e6, 16)]:
        gaps = Gaps()
        gaps.count(float(value), 1)
        assert gaps.drain({})[0] == {bucket: 1}, value


def test_many_at_once_are_counted_as_one_by_one() -> None:
    rng, gaps, bins, at_once = random.Random(6), Gaps(), Bins(), Bins()
    values = [min(80_000.0, rng.lognormvariate(-2, 4)) for _ in range(2000)]
    for value in values:
        gaps.count(value, 1)
    assert gaps.drain(bins)[0] == sort_into(cells_of(values), at_once)
    assert bins == at_once
