"""Tests the work that waits before a newcomer, against a sum over all that wait."""

from __future__ import annotations

import random

import pytest

from baton.router.dispatch.admission import Admission
from baton.router.dispatch.fair_queue import RequestLoad
from baton.router.dispatch.pool_queue import BLOCK, ENOUGH, OrderedWork, PoolQueue
from baton.router.dispatch.ticket import Ticket
from tests.router.dispatch.rooms import Clock


def ticket(order: float, arrival: int, work: float = 1.0, queue: str = "short") -> Ticket:
    return Ticket(Admission(1, Clock()), "m", queue, (order, arrival), 0.0, RequestLoad(work=work))


def test_work_before_a_newcomer_is_the_sum_of_what_is_before_it_in_order() -> None:
    rng, waiting, kept = random.Random(1), OrderedWork(), list[Ticket]()
    for arrival in range(6 * BLOCK):
        one = ticket(float(rng.randrange(100)), arrival, work=rng.randrange(1, 1000))
        waiting.add(one)
        kept.append(one)
        if rng.random() < 0.3:
            kept.remove(gone := rng.choice(kept))
            waiting.remove(gone)
        newcomer = (float(rng.randrange(-5, 105)), arrival)
        assert waiting.work_before(newcomer) == sum(w.load.work for w in kept if w.order < newcomer)
        assert len(waiting) == len(kept)
        assert waiting.last is max(kept, key=lambda w: w.order)
        first = min(kept, key=lambda w: w.order)
        rest = [w for w in kept if w is not first]
        assert waiting.first_but(first) is (min(rest, key=lambda w: w.order) if rest else None)
    while kept:
        waiting.remove(kept.pop(rng.randrange(len(kept))))
    assert not len(waiting)
    assert waiting.work_before((1e9, 0)) == 0


def test_a_class_empties_at_its_own_share_of_the_last_placements() -> None:
    clock = Clock()
    pool = PoolQueue(clock)
    waiting = [ticket(0.0, at, queue="long" if at % 4 == 0 else "short") for at in range(40)]
    for one in waiting:
        pool.add(one)
    for one in waiting[:20]:  # a second each: five of the long class, fifteen of the short one
        clock.now += 1.0
        pool.placed(one)
        pool.remove(one)
    assert pool.emptied_s("long") == pytest.approx(5 * 19 / 5)
    assert pool.emptied_s("short") == pytest.approx(15 * 19 / 15)
    assert pool.emptied_s("other") == pytest.approx(20 * 19 / 20)


def test_a_pace_needs_enough_placements() -> None:
    clock = Clock()
    pool = PoolQueue(clock)
    assert (pool.wait_s((1.0, 0)), pool.emptied_s("short")) == (0.0, 0.0)
    for at in range(ENOUGH):
        clock.now += 1.0
        pool.placed(ticket(0.0, at))
    pool.add(ticket(0.0, 0, work=16.0))
    assert pool.wait_s((1.0, 0)) == pytest.approx(16 * (ENOUGH - 1) / ENOUGH)
