"""Tests the router's queue: order, bounds, patience, and that nothing leaks when a waiter is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from baton.protos.errors import Draining, NoWorker, Overloaded, RequestTooLarge
from baton.router.dispatch.admission import Admission
from baton.router.dispatch.fair_queue import LEVEL_WORK, PATIENCE_S, RequestLoad
from baton.router.dispatch.pool_queue import ENOUGH
from tests.router.dispatch.rooms import Clock, Room, settle


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission(clock: Clock) -> Admission:
    return Admission(4, clock)


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
    tickets = {
        "ordinary": admission.join("m", "short"),
        "urgent": admission.join("m", "short", RequestLoad(priority=-1)),
    }
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


async def test_one_that_holds_a_seat_is_tried_before_those_that_wait_for_it_however_long(admission, clock):
    holder, waiting = (admission.join("m", "short") for _ in range(2))
    seat = await holder.wait(Room(1).attempt)
    behind = asyncio.create_task(waiting.wait(seat.room.attempt))
    await settle()
    clock.now = 10 * PATIENCE_S
    reader = Room(0)
    again = asyncio.create_task(holder.wait(reader.attempt, leads=True))
    await settle()
    assert not again.done()
    reader.free = 1
    admission.wake()
    await settle()
    assert again.done()
    assert not behind.done()
    seat.close()
    admission.wake()
    await asyncio.gather(again, behind)
    for _ in range(2):  # nothing of a waiter that was cancelled stays
        again = asyncio.create_task(holder.wait(Room(0).attempt, leads=True))
        await settle()
        again.cancel()
        await asyncio.wait([again])
    assert not admission._leading


async def test_another_pools_requests_pass_an_impatient_one(admission, clock):
    stuck, other = admission.join("a", "short"), admission.join("b", "short")
    task = asyncio.create_task(stuck.wait(lambda: None))
    await settle()
    clock.now = PATIENCE_S + 1
    await asyncio.wait_for(other.wait(Room(1).attempt), 20)
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
    assert not admission._queue


async def test_a_cancelled_waiter_leaves_no_trace(admission):
    task = asyncio.create_task(admission.join("m", "short").wait(lambda: None))
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert admission.waiting("short") == 0
    assert not admission._queue


async def test_a_closed_queue_takes_nobody(admission):
    admission.close()
    with pytest.raises(Draining):
        admission.join("m", "short")


# ---- shares, value, SLOs -----------------------------------------------------------------------------


async def test_tenants_share_by_weight_however_much_one_of_them_sends(clock):
    admission = Admission(100, clock)
    tickets = {f"flood{i}": admission.join("m", "short", RequestLoad(tenant="flood", work=100)) for i in range(20)}
    for i in range(4):
        tickets[f"small{i}"] = admission.join("m", "short", RequestLoad(tenant="small", work=100))
        tickets[f"double{i}"] = admission.join("m", "short", RequestLoad(tenant="double", weight=2.0, work=100))
    order = await in_order(admission, tickets, Room(0))
    first = order[:8]
    assert sum(n.startswith("double") for n in first) == 4  # twice the weight: half of what small and flood leave
    assert sum(n.startswith("small") for n in first) == 2
    assert sum(n.startswith("flood") for n in first) == 2


async def test_one_that_passed_others_of_its_tenant_moves_no_newcomer_behind_them(clock):
    admission, room = Admission(100, clock), Room(0)
    flood = {f"a{n}": admission.join("m", "short", RequestLoad(tenant="a", work=10)) for n in range(20)}
    room.free = 1
    slot = await flood.pop("a19").wait(room.attempt)  # it looks for a place while the others are still planned
    late = {f"b{n}": admission.join("m", "short", RequestLoad(tenant="b", work=10)) for n in range(3)}
    order = await in_order(admission, flood | late, room)
    slot.close()
    assert [name for name in order[:6] if name[0] == "b"] == ["b0", "b1", "b2"]


@pytest.mark.parametrize(
    ("asking", "weights"),
    [
        ({"a": 10, "b": 2}, {}),
        ({"a": 2, "b": 2, "c": 2}, {}),
        ({"a": 12, "b": 3}, {"a": 3.0}),
    ],
    ids=str,
)
async def test_a_full_queue_keeps_the_shares_however_often_a_tenant_is_refused(clock, asking, weights):
    """Each round, every tenant asks so often and one request is placed; the queue is full nearly always."""
    admission, room, served, waiting = Admission(16, clock), Room(0), dict.fromkeys(asking, 0), set()

    async def serve(tenant, ticket):
        try:
            await ticket.wait(room.attempt)
            served[tenant] += 1
        except Overloaded:
            pass  # it gave way to another one
        finally:
            ticket.leave()

    for at in range(400):
        clock.now += 0.25
        for tenant in random.Random(at).sample(
            [name for name, count in asking.items() for _ in range(count)], k=sum(asking.values())
        ):
            load = RequestLoad(tenant=tenant, weight=weights.get(tenant, 1.0), work=100)
            with contextlib.suppress(Overloaded):
                waiting.add(asyncio.create_task(serve(tenant, admission.join("m", "short", load))))
        room.free = 1
        admission.wake()
        await settle()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    total = sum(weights.get(tenant, 1.0) for tenant in asking)
    assert served == {name: pytest.approx(400 * weights.get(name, 1.0) / total, rel=0.1) for name in asking}


async def test_a_full_queue_of_one_model_refuses_and_sheds_nobody_of_another(clock):
    admission = Admission(4, clock)
    for _ in range(10):  # a model that has answered more is further in its own virtual time
        ticket = admission.join("idle", "short", RequestLoad(work=100))
        (await ticket.wait(Room(1).attempt)).close()
        ticket.leave()
    for _ in range(4):
        admission.join("busy", "short", RequestLoad(work=100))
    with pytest.raises(Overloaded, match="for 'busy' is full"):
        admission.join("busy", "short", RequestLoad(work=100))
    waiting = [admission.join("idle", "short", RequestLoad(work=100)) for _ in range(4)]
    assert (admission.waiting("short"), admission.queued) == (8, 8)
    with pytest.raises(Overloaded):
        admission.join("busy", "short", RequestLoad(work=100))
    for ticket in waiting:
        await ticket.wait(Room(1).attempt)


async def test_one_who_leaves_the_queue_is_not_put_back_for_it(clock):
    admission = Admission(100, clock)
    admission.join("m", "short", RequestLoad(tenant="b", work=100))
    left = [admission.join("m", "short", RequestLoad(tenant="a", work=100)) for _ in range(50)]
    for ticket in left:
        ticket.leave()
    later = {f"b{n}": admission.join("m", "short", RequestLoad(tenant="b", work=100)) for n in range(3)}
    later["a"] = admission.join("m", "short", RequestLoad(tenant="a", work=100))
    assert (await in_order(admission, later, Room(0)))[0] == "a"


async def test_the_least_urgent_are_served_in_the_end(clock):
    """One level of priority is worth a bounded amount of others' work."""
    admission = Admission(1000, clock)
    tickets = {"idle": admission.join("m", "short", RequestLoad(tenant="batch", priority=1, work=1))}
    work = LEVEL_WORK / 10
    tickets |= {f"u{i}": admission.join("m", "short", RequestLoad(tenant="urgent", work=work)) for i in range(20)}
    assert (await in_order(admission, tickets, Room(0))).index("idle") in (10, 11)


async def test_a_full_class_sheds_the_least_valuable_first(admission):
    tickets = [admission.join("m", "short", RequestLoad(tenant="flood", work=100)) for _ in range(4)]
    with pytest.raises(Overloaded):
        admission.join("m", "short", RequestLoad(tenant="flood", work=100))
    modest = admission.join("m", "short", RequestLoad(tenant="modest", work=100))
    assert admission.waiting("short") == 4
    with pytest.raises(Overloaded):
        await tickets[3].wait(Room(1).attempt)  # the flood's last gave way
    await modest.wait(Room(1).attempt)


async def test_requests_in_flight_hold_so_many_bytes_and_no_more(clock):
    admission = Admission(100, clock, max_inflight_bytes=1000)
    ticket = admission.join("m", "short", RequestLoad(size=900))
    with pytest.raises(Overloaded, match="max_inflight_bytes"):
        admission.join("m", "short", RequestLoad(size=200))
    await ticket.wait(Room(1).attempt)
    with pytest.raises(Overloaded):
        admission.join("m", "short", RequestLoad(size=200))  # placed, but still here
    ticket.leave()
    ticket.leave()
    admission.join("m", "short", RequestLoad(size=200))


async def test_one_that_is_over_the_limit_alone_is_refused_for_good_and_sheds_nobody(clock):
    admission = Admission(100, clock, max_inflight_bytes=1000)
    waiting = admission.join("m", "short", RequestLoad(tenant="a", size=900))
    with pytest.raises(
        RequestTooLarge, match=r"1001 bytes .* 1000 \(router.max_inflight_bytes\): shorten"
    ) as refused:
        admission.join("m", "short", RequestLoad(tenant="b", size=1001))
    assert not refused.value.retryable
    assert refused.value.retry_after_s == 0
    await waiting.wait(Room(1).attempt)
    waiting.leave()
    admission.join("m", "short", RequestLoad(tenant="b", size=1000))


async def placed_each(admission: Admission, clock: Clock, every_s: float, count: int) -> None:
    """Makes ``count`` placements of 100 tokens, one each ``every_s`` seconds."""
    for ticket in [admission.join("m", "short", RequestLoad(work=100)) for _ in range(count)]:
        clock.now += every_s
        await ticket.wait(Room(1).attempt)


async def test_one_that_would_wait_too_long_is_refused_at_once_with_the_time_to_come_back(clock):
    admission = Admission(100, clock)
    behind = [admission.join("m", "short", RequestLoad(work=100)) for _ in range(20)]
    await placed_each(admission, clock, 0.1, ENOUGH + 1)
    admission.join("m", "short", RequestLoad(slo_ttft_s=3.0))  # 20 x 100 tokens at about 1,000 a second
    with pytest.raises(Overloaded, match="first token") as refused:
        admission.join("m", "short", RequestLoad(slo_ttft_s=0.5))
    assert 1.0 < refused.value.retry_after_s < 1.8
    admission.join("m", "short", RequestLoad())  # without an SLO one may wait
    for ticket in behind:
        ticket.leave()


async def test_an_idle_tenant_is_not_refused_for_what_a_flood_has_queued_behind_it(clock):
    admission = Admission(100, clock)
    flood = [admission.join("m", "short", RequestLoad(tenant="flood", work=100)) for _ in range(20)]
    await placed_each(admission, clock, 0.1, ENOUGH + 1)
    with pytest.raises(Overloaded, match="it would wait"):
        admission.join("m", "short", RequestLoad(tenant="flood", work=100, slo_ttft_s=0.5))
    idle = admission.join("m", "short", RequestLoad(tenant="idle", work=100, slo_ttft_s=0.5))
    await idle.wait(Room(1).attempt)
    for ticket in flood:
        ticket.leave()


async def test_one_refused_as_late_is_not_put_back_for_it(clock):
    admission = Admission(100, clock)
    behind = [admission.join("m", "short", RequestLoad(tenant="b", work=100)) for _ in range(20)]
    await placed_each(admission, clock, 0.1, ENOUGH + 1)
    for _ in range(50):
        with pytest.raises(Overloaded, match="it would wait"):
            admission.join("m", "short", RequestLoad(tenant="b", work=100, slo_ttft_s=0.5))
    later = {"a": admission.join("m", "short", RequestLoad(tenant="a", work=3000))}
    later |= {f"b{n}": admission.join("m", "short", RequestLoad(tenant="b", work=100)) for n in range(2)}
    later["a2"] = admission.join("m", "short", RequestLoad(tenant="a", work=100))
    for ticket in behind:
        ticket.leave()
    assert (await in_order(admission, later, Room(0)))[-1] == "a2"
