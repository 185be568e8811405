"""Tests that requests whose first tokens can't come in time any more give way, wherever in the queue they are."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.protos.errors import Overloaded
from baton.router.dispatch.admission import Admission
from baton.router.dispatch.fair_queue import LOOK_AHEAD, RequestLoad
from baton.router.dispatch.late_tickets import SLACK
from baton.router.dispatch.throttle import Throttle
from baton.router.dispatch.ticket import Ticket
from tests.router.dispatch.rooms import Clock, Room, settle


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_one_that_can_no_longer_come_in_time_gives_way(clock):
    admission, room = Admission(4, clock), Room(0)
    late, patient = admission.join("m", "short", RequestLoad(slo_ttft_s=1.0)), admission.join("m", "short")
    tasks = [asyncio.create_task(t.wait(room.attempt)) for t in (late, patient)]
    await settle()
    clock.now = 1.5
    room.free = 1
    admission.wake()
    with pytest.raises(Overloaded, match="no worker was free within the 1 s"):
        await tasks[0]
    await tasks[1]


async def test_all_that_are_late_give_way_however_deep_in_the_queue_and_leave_nothing(clock):
    admission = Admission(1000, clock, Throttle(clock), max_inflight_bytes=10_000)
    patient = [admission.join("m", "short", RequestLoad(size=1)) for _ in range(3 * LOOK_AHEAD)]
    late = [admission.join("m", "short", RequestLoad(slo_ttft_s=1.0, size=1)) for _ in range(5)]
    later = [admission.join("m", "short", RequestLoad(slo_ttft_s=3.0, size=1)) for _ in range(5)]
    tasks = [asyncio.create_task(ticket.wait(lambda: None)) for ticket in (*patient, *late, *later)]
    await settle()
    clock.now = 1.5
    admission.wake()
    await settle()
    ended = [task for task in tasks if task.done()]
    assert ended == tasks[len(patient) : len(patient) + len(late)]
    assert {type(task.exception()) for task in ended} == {Overloaded}
    assert admission.waiting("short") == len(patient) + len(later)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (admission.queued, bool(admission._queue)) == (0, False)


@pytest.mark.parametrize("seed", range(3))
async def test_who_is_late_is_who_waited_longer_than_its_budget_whatever_answers_took(clock, seed):
    """Beside the plain rule: each ticket alone, asked at each moment."""
    rng, throttle = random.Random(seed), Throttle(clock)
    admission, waiting, shed = Admission(10_000, clock, throttle), dict[int, Ticket](), set[int]()
    for at in range(400):
        clock.now += rng.uniform(0.0, 0.1)
        for _ in range(rng.randrange(3)):
            throttle.answered("m", "short", rng.choice((0.05, 0.5, 2.0)), 0.0, 0.0, 1)
        ticket = admission.join("m", "short", RequestLoad(slo_ttft_s=rng.choice((0.0, 0.3, 1.0, 2.0, 8.0))))
        ticket.shed = lambda error, at=at: shed.add(at)  # type: ignore[method-assign]
        waiting[at] = ticket
        if rng.random() < 0.3:
            waiting.pop(rng.choice(list(waiting))).leave()
        due = {
            n
            for n, t in waiting.items()
            if (slo := t.load.slo_ttft_s) and clock.now - t.since > throttle.queue_budget("m", "short", slo)
        }
        shed.clear()
        admission._pump()
        assert shed == due
        for number in due:
            assert not waiting.pop(number).counted
    assert len(admission._pools["m"]._late["short"]._early) <= 2 * len(waiting) + SLACK
