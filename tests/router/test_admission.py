"""The router's queue: order, bounds, patience, and that nothing leaks when a waiter is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from baton.protos.errors import Draining, NoWorker, Overloaded
from baton.router.admission import PATIENCE_S, Admission


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Room:
    """Slots that count themselves."""

    def __init__(self, free: int) -> None:
        self.free = free

    def attempt(self) -> Slot | None:
        if self.free <= 0:
            return None
        self.free -= 1
        return Slot(self)


class Slot:
    def __init__(self, room: Room) -> None:
        self.room = room

    def close(self) -> None:
        self.room.free += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission(clock: Clock) -> Admission:
    return Admission(4, clock)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def in_order(admission: Admission, tickets: dict, room: Room) -> list[str]:
    """Names in the order in which they were placed, one slot at a time."""
    placed: list[str] = []

    async def wait(name, ticket):
        slot = await ticket.wait(room.attempt)
        placed.append(name)
        slot.close()
        admission.wake()

    tasks = [asyncio.create_task(wait(n, t)) for n, t in tickets.items()]
    await settle()
    room.free += 1
    admission.wake()
    await asyncio.gather(*tasks)
    return placed


async def test_tickets_are_placed_in_the_order_of_arrival_whenever_they_start_to_wait(admission):
    first, second, third = (admission.join("m", "short") for _ in range(3))
    assert await in_order(admission, {"c": third, "a": first, "b": second}, Room(0)) == ["a", "b", "c"]


async def test_a_lower_priority_number_is_sooner(admission):
    tickets = {"ordinary": admission.join("m", "short"), "urgent": admission.join("m", "short", -1)}
    assert await in_order(admission, tickets, Room(0)) == ["urgent", "ordinary"]


async def test_a_full_class_refuses_with_a_time_to_come_back_and_other_classes_go_on(admission):
    tickets = [admission.join("m", "short") for _ in range(4)]
    with pytest.raises(Overloaded) as caught:
        admission.join("m", "short")
    assert caught.value.retry_after_s >= 1
    admission.join("m", "long")
    tickets[0].leave()
    tickets[0].leave()
    assert admission.waiting("short") == 3
    admission.join("m", "short")


async def test_a_placed_request_no_longer_fills_the_queue(admission):
    ticket = admission.join("m", "short")
    await ticket.wait(Room(1).attempt)
    assert admission.waiting("short") == 0


async def test_a_request_that_waits_again_has_its_old_place(admission):
    old, young = admission.join("m", "short"), admission.join("m", "short")
    room = Room(1)
    await old.wait(room.attempt)
    assert await in_order(admission, {"young": young, "old": old}, room) == ["old", "young"]


async def test_a_ticket_beside_another_shares_its_place_and_is_not_counted(admission):
    first, late = admission.join("m", "short"), admission.join("m", "short")
    sibling = admission.beside(first)
    assert admission.waiting("short") == 2
    assert await in_order(admission, {"late": late, "sibling": sibling}, Room(0)) == ["sibling", "late"]


async def test_a_small_one_passes_a_big_one_until_its_patience_ends(admission, clock):
    room = Room(1)
    big, small, later = (admission.join("m", c) for c in ("long", "short", "short"))
    waits = asyncio.create_task(big.wait(lambda: room.attempt() if room.free >= 2 else None))
    slot = await small.wait(room.attempt)
    slot.close()
    clock.now = PATIENCE_S + 1
    blocked = asyncio.create_task(later.wait(room.attempt))
    await settle()
    assert not blocked.done()
    room.free = 3
    admission.wake()
    await asyncio.gather(waits, blocked)


async def test_another_pools_requests_pass_an_impatient_one(admission, clock):
    stuck, other = admission.join("a", "short"), admission.join("b", "short")
    task = asyncio.create_task(stuck.wait(lambda: None))
    await settle()
    clock.now = PATIENCE_S + 1
    await asyncio.wait_for(other.wait(Room(1).attempt), 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_an_attempt_raises_reaches_its_own_waiter_alone(admission):
    def fail() -> None:
        raise NoWorker("nobody")

    with pytest.raises(NoWorker):
        await admission.join("m", "short").wait(fail)
    await admission.join("m", "short").wait(Room(1).attempt)


async def test_a_waiter_cancelled_in_the_very_turn_it_was_placed_gives_the_slot_back(admission):
    room = Room(0)
    task = asyncio.create_task(admission.join("m", "short").wait(room.attempt))
    await settle()
    room.free = 1
    admission._pump()
    assert room.free == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert room.free == 1
    assert admission.waiting("short") == 0
    assert not admission._queues


async def test_a_cancelled_waiter_leaves_no_trace(admission):
    task = asyncio.create_task(admission.join("m", "short").wait(lambda: None))
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert admission.waiting("short") == 0
    assert not admission._queues


async def test_a_closed_queue_takes_nobody(admission):
    admission.close()
    with pytest.raises(Draining):
        admission.join("m", "short")
