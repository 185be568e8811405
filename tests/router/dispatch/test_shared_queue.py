"""Tests what models and tenants that share a router's queue do to one another: no more than they must."""

from __future__ import annotations

import asyncio

import pytest

from baton.protos.errors import Overloaded
from baton.router.dispatch.admission import ASIDE_S, Admission
from baton.router.dispatch.fair_queue import LOOK_AHEAD, PATIENCE_S, RequestLoad
from baton.router.dispatch.pool_queue import ENOUGH
from baton.router.dispatch.ticket import NoneAble
from tests.router.dispatch.rooms import Clock, Room, settle


@pytest.fixture
def clock() -> Clock:
    return Clock()


def nobody() -> None:
    raise NoneAble


async def placed_each(admission: Admission, clock: Clock, pool: str, every_s: float, count: int) -> None:
    """Makes ``count`` placements of 100 tokens, one each ``every_s`` seconds."""
    for ticket in [admission.join(pool, "short", RequestLoad(work=100)) for _ in range(count)]:
        clock.now += every_s
        await ticket.wait(Room(1).attempt)


async def test_a_slow_models_pace_refuses_nobody_of_a_quick_one(clock: Clock) -> None:
    admission = Admission(1000, clock)
    for pool in ("slow", "quick"):
        admission.join(pool, "short", RequestLoad(work=100))  # somebody waits in both, all the time
    await placed_each(admission, clock, "slow", 5.0, ENOUGH + 1)
    await placed_each(admission, clock, "quick", 0.01, ENOUGH + 1)
    admission.join("quick", "short", RequestLoad(work=100, slo_ttft_s=1.0))
    with pytest.raises(Overloaded, match="it would wait"):
        admission.join("slow", "short", RequestLoad(work=100, slo_ttft_s=1.0))


async def test_a_full_class_says_when_it_will_have_emptied_whatever_other_models_do(clock: Clock) -> None:
    admission = Admission(10, clock)
    for _ in range(10):
        admission.join("stuck", "short", RequestLoad(work=100))  # a model nobody of which is ever placed
    admission.join("quick", "short", RequestLoad(work=100))
    await placed_each(admission, clock, "quick", 1.0, 9)
    for _ in range(9):
        admission.join("quick", "short", RequestLoad(work=100))
    with pytest.raises(Overloaded, match="is full") as refused:
        admission.join("quick", "short", RequestLoad(work=100))
    assert refused.value.retry_after_s == pytest.approx(10 * 8 / 9)  # its ten, at its pace of nine in eight seconds


async def test_the_shares_of_a_model_nobody_waits_for_begin_anew_while_another_is_busy(clock: Clock) -> None:
    admission = Admission(1000, clock)
    admission.join("busy", "short")
    flood = [admission.join("m", "short", RequestLoad(tenant="flood", work=1000)) for _ in range(20)]
    for ticket in reversed(flood):  # the last first, so that virtual time stays where the first began
        await ticket.wait(Room(1).attempt)
    later = [admission.join("m", "short", RequestLoad(tenant=name, work=1000)) for name in ("flood", "other")]
    assert later[0].order < later[1].order


async def test_a_tenants_request_of_another_class_that_passes_its_own_puts_nobody_behind_them(clock: Clock) -> None:
    admission = Admission(1000, clock)
    flood = [admission.join("m", "short", RequestLoad(tenant="flood", work=100)) for _ in range(30)]
    passing = admission.join("m", "long", RequestLoad(tenant="flood", work=100))
    await passing.wait(Room(1).attempt)
    for queue in ("short", "long"):
        assert admission.join("m", queue, RequestLoad(tenant="rare", work=100)).order < flood[2].order


async def test_one_whom_no_worker_could_take_keeps_no_share_for_those_who_come_later(clock: Clock) -> None:
    admission, busy = Admission(1000, clock), RequestLoad(tenant="busy", work=100)
    stuck = asyncio.create_task(admission.join("m", "short", RequestLoad(tenant="broken")).wait(nobody))
    await settle()
    ahead, second = admission.join("m", "short", busy), admission.join("m", "short", busy)
    for _ in range(20):
        await ahead.wait(Room(1).attempt)
        ahead, second = second, admission.join("m", "short", busy)
    late = [admission.join("m", "short", RequestLoad(tenant="late", work=100)) for _ in range(3)]
    assert late[2].order > ahead.order
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)


@pytest.mark.parametrize("patient", [True, False])
async def test_those_whom_no_worker_could_take_hold_nobody_back_and_are_tried_again(clock: Clock, patient) -> None:
    admission = Admission(1000, clock)
    able = {"now": False}
    room = Room(100)

    def attempt():
        return room.attempt() if able["now"] else nobody()

    stuck = [admission.join("m", "short", RequestLoad(tenant="broken")) for _ in range(2 * LOOK_AHEAD)]
    waits = [asyncio.create_task(ticket.wait(attempt)) for ticket in stuck]
    await settle()
    clock.now = 0.0 if patient else PATIENCE_S + 1
    other = admission.join("m", "short", RequestLoad(tenant="other"))
    await asyncio.wait_for(other.wait(Room(1).attempt), 10)
    waits[0].cancel()
    able["now"], clock.now = True, clock.now + 2 * ASIDE_S
    admission.wake()
    await asyncio.wait(waits, timeout=10)
    assert [task.cancelled() for task in waits] == [True] + [False] * (2 * LOOK_AHEAD - 1)
    assert room.free == 100 - (2 * LOOK_AHEAD - 1)
    assert not admission._aside
    assert admission.queued == 0


async def test_all_whom_no_worker_could_take_learn_it_at_the_same_time(clock: Clock) -> None:
    admission, tried = Admission(1000, clock), set[int]()

    def attempt(number: int):
        tried.add(number)
        return nobody()

    tickets = [admission.join("m", "short") for _ in range(3 * LOOK_AHEAD)]
    waits = [asyncio.create_task(t.wait(lambda n=n: attempt(n))) for n, t in enumerate(tickets)]
    await settle()
    assert len(tried) == 3 * LOOK_AHEAD
    for task in waits:
        task.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def test_the_tenant_that_holds_most_of_the_routers_memory_gives_way_to_others(clock: Clock) -> None:
    admission = Admission(100, clock, max_inflight_bytes=1000)
    flood = [admission.join("m", "short", RequestLoad(tenant="flood", size=240)) for _ in range(4)]
    waits = [asyncio.create_task(ticket.wait(lambda: None)) for ticket in flood]
    await settle()
    with pytest.raises(Overloaded, match="max_inflight_bytes"):
        admission.join("m", "short", RequestLoad(tenant="flood", size=240))
    modest = admission.join("other", "short", RequestLoad(tenant="modest", size=240))
    assert admission.held_bytes == 960
    with pytest.raises(Overloaded, match="max_inflight_bytes"):
        await waits[3]
    flood[3].leave()
    assert admission.held_bytes == 960
    more = admission.join("other", "short", RequestLoad(tenant="modest", size=240))
    with pytest.raises(Overloaded, match="max_inflight_bytes"):
        admission.join("other", "short", RequestLoad(tenant="modest", size=240))
    for ticket in (*flood, modest, more):
        ticket.leave()
    assert admission.held_bytes == 0
    for task in waits:
        task.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def test_nobody_gives_way_where_that_would_not_be_enough(clock: Clock) -> None:
    admission = Admission(100, clock, max_inflight_bytes=1000)
    placed = admission.join("m", "short", RequestLoad(tenant="a", size=700))
    await placed.wait(Room(1).attempt)
    waiting = admission.join("m", "short", RequestLoad(tenant="a", size=290))
    with pytest.raises(Overloaded):
        admission.join("m", "short", RequestLoad(tenant="b", size=310))
    await waiting.wait(Room(1).attempt)
    waiting.leave()
    admission.join("m", "short", RequestLoad(tenant="b", size=300))


async def test_one_that_is_refused_leaves_no_share_of_a_model_for_which_nobody_waits(clock: Clock) -> None:
    admission = Admission(1000, clock, max_inflight_bytes=100)
    holder = admission.join("m", "short", RequestLoad(size=90))
    for name in range(10):
        with pytest.raises(Overloaded, match="max_inflight_bytes"):
            admission.join(f"model {name}", "short", RequestLoad(size=20))
    assert admission._shares.pools() == ["m"]
    holder.leave()
    assert admission._shares.pools() == []
