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
    assert throttle.queue_budget("m", "short", 1.0) == 1.0
    for i in range(20):
        throttle.answered("m", "short", 0.1 if i < 17 else 0.7, 0.0, 0.0, 1)
    assert throttle.queue_budget("m", "short", 1.0) == pytest.approx(0.3)
    assert throttle.queue_budget("m", "short", 0.5) == 0.05
    assert throttle.queue_budget("m", "long", 1.0) == 1.0


def answers(throttle: Throttle, clock: Clock, count: int, every_s: float, tpot_s: float, most: int) -> None:
    """Has ``count`` answers come, one each ``every_s`` seconds, whose SLO is 0.05 s per token."""
    for _ in range(count):
        clock.now += every_s
        throttle.answered("m", "short", 0.1, tpot_s, 0.05, most)


def test_slow_steps_shrink_the_batch_and_quick_ones_let_it_grow_again(clock: Clock) -> None:
    throttle = Throttle(clock)
    answers(throttle, clock, 40, 0.1, 0.08, 32)
    shrunk = throttle.cap("m", 64)
    assert 2 <= shrunk < 30
    clock.now += 31
    answers(throttle, clock, 40, 0.1, 0.02, 30)
    assert throttle.cap("m", 64) > shrunk
    assert throttle.cap("m", 4) == 4


def test_what_finds_room_at_once_is_in_time_however_slow_the_last_answers_were(clock: Clock) -> None:
    throttle = Throttle(clock)
    for _ in range(20):
        throttle.answered("m", "short", 10.0, 0.0, 0.0, 1)
    assert throttle.queue_budget("m", "short", 2.0) == pytest.approx(0.2)


def test_a_slow_model_leaves_another_ones_time_and_batches_alone(clock: Clock) -> None:
    throttle = Throttle(clock)
    for _ in range(40):
        clock.now += 0.1
        throttle.answered("slow", "short", 5.0, 0.2, 0.05, 32)
        throttle.answered("quick", "short", 0.1, 0.02, 0.05, 32)
    assert throttle.queue_budget("slow", "short", 6.0) == pytest.approx(1.0)
    assert throttle.queue_budget("quick", "short", 2.0) == pytest.approx(1.9)
    assert throttle.cap("slow", 64) < 32
    assert throttle.cap("quick", 64) == 64


def test_a_cap_that_nobody_reaches_does_not_grow_so_that_it_holds_when_it_must(clock: Clock) -> None:
    throttle = Throttle(clock)
    answers(throttle, clock, 40, 0.1, 0.08, 32)
    shrunk = throttle.cap("m", 1024)
    clock.now += 31
    answers(throttle, clock, 7200, 0.5, 0.02, 3)  # an hour of light load
    assert throttle.cap("m", 1024) == shrunk


def test_a_further_choices_wait_for_the_first_is_no_workers_pace(clock: Clock) -> None:
    throttle = Throttle(clock)
    for _ in range(20):
        throttle.answered("m", "short", None, 0.02, 0.05, 1)
    assert throttle.queue_budget("m", "short", 1.0) == 1.0
