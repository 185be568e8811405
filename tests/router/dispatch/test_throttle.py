"""Tests what the measured pace leaves of an SLO for the queue, and how many sequences a decode worker may have."""

from __future__ import annotations

import pytest

from baton.router.dispatch.throttle import Throttle


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_the_way_after_the_queue_takes_is_left_of_the_slo(clock: Clock) -> None:
    throttle = Throttle(clock)
    assert throttle.queue_budget("short", 1.0) == 1.0
    for i in range(20):
        throttle.answered("short", 0.1 if i < 17 else 0.7, 0.0, 0.0, 1)
    assert throttle.queue_budget("short", 1.0) == pytest.approx(0.3)
    assert throttle.queue_budget("short", 0.5) == 0.0
    assert throttle.queue_budget("long", 1.0) == 1.0


def test_slow_steps_shrink_the_batch_and_quick_ones_let_it_grow_again(clock: Clock) -> None:
    throttle = Throttle(clock)
    for _ in range(40):
        clock.now += 0.1
        throttle.answered("short", 0.1, 0.08, 0.05, 32)
    shrunk = throttle.cap(64)
    assert 2 <= shrunk < 30
    clock.now += 31
    for _ in range(40):
        clock.now += 0.1
        throttle.answered("short", 0.1, 0.02, 0.05, 10)
    assert throttle.cap(64) > shrunk
    assert throttle.cap(4) == 4
