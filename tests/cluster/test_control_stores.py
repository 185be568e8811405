"""Tests what the controller, its routers and their workers leave in Redis for one another."""

import asyncio

import pytest
from redis.asyncio import Redis

from baton.cluster.advice import (
    TIMELINE,
    Advice,
    AdviceStore,
    OperatorWishes,
    RatioPin,
    RatioPoint,
    TimelineEntry,
    TwinError,
)
from baton.cluster.membership import connect
from baton.cluster.roles import RoleWishes, forget_roles
from baton.cluster.store.lease import NamedLease
from baton.cluster.traffic import (
    PAGE,
    ClassTraffic,
    PredictedAnswer,
    ServedRequest,
    TrafficSlice,
    TrafficStore,
    by_class,
)

ADVICE = Advice(
    1.0, "auto", 3, 5, "because", (4, 4), (3, 5), (3, 4), (RatioPoint(1, 7, 0.5, 0.9),), (0.5, 0.9), TwinError(0.1)
)
PIN = RatioPin(3, 5, 1.0, "ada")


async def test_advice_comes_back_as_it_went_and_expires(redis):
    store = AdviceStore(redis, "t")
    assert await store.get() is None
    assert await store.put(ADVICE, ttl_s=60)
    assert await store.get() == ADVICE
    assert await store.put(ADVICE, ttl_s=0.05)
    async with asyncio.timeout(30):
        while await store.get() is not None:
            await asyncio.sleep(0.01)


async def test_the_timeline_is_newest_first_and_bounded(redis):
    store = AdviceStore(redis, "t")
    for i in range(TIMELINE + 5):
        await store.note(TimelineEntry(float(i), "hold", (1, 1), (1, 1), "r"))
    found = await store.timeline()
    assert (len(found), found[0].at, found[-1].at) == (TIMELINE, TIMELINE + 4.0, 5.0)
    assert len(await store.timeline(3)) == 3


async def test_a_pin_and_a_mode_stay_until_they_are_taken_back(redis):
    store = AdviceStore(redis, "t")
    assert (await store.pinned(), await store.wishes()) == (None, OperatorWishes("", None))
    await store.pin(PIN)
    await store.set_mode("auto")
    assert (await store.pinned(), await store.wishes()) == (PIN, OperatorWishes("auto", PIN))
    await store.pin(None)
    assert (await store.pinned(), await store.wishes()) == (None, OperatorWishes("auto", None))


async def test_an_operator_takes_back_no_pin_but_his_own(redis):
    """His ratio could not be formed; another operator's could, and was pinned meanwhile."""
    store, other = AdviceStore(redis, "t"), RatioPin(2, 2, 3.0, "bob")
    for earlier in (PIN, None):
        await store.pin(other)
        await store.unpin(other, earlier)
        assert await store.pinned() == earlier
    await store.pin(other)
    await store.unpin(PIN, None)
    assert await store.pinned() == other


async def test_a_pin_and_a_mode_stay_when_redis_restarts_empty(redis):
    leader = AdviceStore(redis, "t")
    await leader.pin(PIN)
    await leader.set_mode("advise")
    assert await leader.wishes() == OperatorWishes("advise", PIN)
    await redis.flushall()
    assert await leader.wishes() == OperatorWishes("advise", PIN)
    assert await AdviceStore(redis, "t").pinned() == PIN, "routers that ask hear of it, too"
    assert await AdviceStore(redis, "t").wishes() == OperatorWishes("advise", PIN)


async def test_what_an_operator_asked_of_the_empty_redis_counts_and_not_what_was_known(redis):
    leader, router = AdviceStore(redis, "t"), AdviceStore(redis, "t")
    await router.pin(PIN)
    assert (await leader.wishes()).pin == PIN
    await redis.flushall()
    await router.pin(None)
    assert await leader.wishes() == OperatorWishes()


async def test_what_an_earlier_version_took_back_is_not_asked_again(redis):
    """An earlier version leaves no sign of an operator's wishes."""
    leader = AdviceStore(redis, "t")
    await redis.set("{t}:control:mode", "auto")
    assert await leader.wishes() == OperatorWishes("auto")
    await redis.delete("{t}:control:mode")
    assert await leader.wishes() == OperatorWishes()


async def test_all_that_is_shown_of_the_controller_is_asked_for_together(redis):
    store = AdviceStore(redis, "t")
    assert await store.look() == (None, (), None)
    changes = [TimelineEntry(float(i), "hold", (1, 1), (1, 1), "r") for i in range(4)]
    for change in changes:
        await store.note(change)
    await store.put(ADVICE)
    await store.pin(RatioPin(3, 5, 1.0, "ada"))
    assert await store.look(2) == (ADVICE, (changes[3], changes[2]), RatioPin(3, 5, 1.0, "ada"))


async def test_an_entry_of_another_version_is_passed_over(redis):
    store = AdviceStore(redis, "t")
    await redis.lpush("{t}:control:timeline", b"\x01nonsense")
    await redis.set("{t}:control:advice", b"\x01nonsense")
    assert (await store.timeline(), await store.get()) == ((), None)
    assert await store.look() == (None, (), None)


async def test_without_redis_nothing_is_known_and_nothing_raised(server, redis):
    gone = connect("unix:///nowhere/redis.sock")
    store, traffic = AdviceStore(gone, "t"), TrafficStore(gone, "t")
    assert (await store.put(ADVICE), await store.get(), await store.timeline()) == (False, None, ())
    assert await store.look() == (None, (), None)
    assert not await NamedLease(gone, "t", "controller", "me", 1.0).hold()
    await traffic.push(TrafficSlice("r", 1.0, 1.0))
    assert await traffic.recent(0.0) == []
    assert not await RoleWishes(gone, "t").want("s", "decode")


async def test_one_of_two_leads_until_it_leaves_or_its_lease_ends(redis):
    one, two = (NamedLease(redis, "t", "controller", who, 60) for who in ("one", "two"))
    assert (await one.hold(), await two.hold(), await one.hold()) == (True, False, True)
    await two.leave()  # not its own to leave
    assert not await two.hold()
    await one.leave()
    assert (await two.hold(), await one.hold()) == (True, False)
    await two.leave()
    assert await NamedLease(redis, "t", "controller", "brief", 0.05).hold()
    async with asyncio.timeout(30):
        while not await one.hold():
            await asyncio.sleep(0.01)


async def test_slices_add_up_over_routers_and_seconds(redis):
    store = TrafficStore(redis, "t")
    parts = [
        TrafficSlice(
            r,
            at,
            1.0,
            {"c": ClassTraffic(arrived=2, output_tokens=10)},
            0,
            0,
            [PredictedAnswer(1.0, None, 0.1, 0.2)],
        )
        for at in (1.0, 2.0)
        for r in ("a", "b")
    ]
    parts[0].served.append(ServedRequest(1.0, 2, 3, 4))
    for part in parts:
        await store.push(part)
    found = await store.recent(0.0)
    assert (len(found), [s for one in found for s in one.served]) == (4, [ServedRequest(1.0, 2, 3, 4)])
    assert by_class(found)["c"] == ClassTraffic(arrived=8, output_tokens=40)
    assert len(await store.recent(1.5)) == 2


async def test_a_slot_is_wished_a_role_until_its_cluster_begins_anew(server, redis):
    wishes = RoleWishes(redis, "t")
    assert await wishes.of("w-3") == ""
    assert await wishes.want("w-3", "decode")
    assert await wishes.of("w-3") == "decode"
    await wishes.want("w-4", "nonsense")
    assert await wishes.of("w-4") == ""
    await asyncio.to_thread(forget_roles, server.url, "t")
    assert await wishes.of("w-3") == ""


async def test_a_turn_lasts_as_long_as_it_is_entered_and_then_others_have_theirs(redis: Redis) -> None:
    one, two = (NamedLease(redis, "t", "roles", who, 0.5) for who in ("one", "two"))
    order: list[str] = []

    async def take(lease: NamedLease, name: str, seconds: float) -> None:
        async with lease.turn(30.0):
            order.append(f"{name} in")
            await asyncio.sleep(seconds)
            order.append(f"{name} out")

    first = asyncio.create_task(take(one, "one", 0.8))
    while not order:
        await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError):
        await _refused(two)
    await asyncio.gather(first, take(two, "two", 0.0))
    assert order == ["one in", "one out", "two in", "two out"]


async def _refused(lease: NamedLease) -> None:
    async with lease.turn(0.6):
        raise AssertionError("another has it")


async def test_traffic_is_read_in_pages_each_slice_once_and_no_further_than_asked_for(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy cluster's ten minutes decoded at once held up the leading router's requests for 0.3 s."""
    store, pages = TrafficStore(redis, "t"), list[int]()
    for at in range(10 * PAGE):
        await store.push(TrafficSlice("r", float(at), 1.0))
    lrange = redis.lrange

    async def read(*where: object) -> list[bytes]:
        await store.push(TrafficSlice("other", 1000.0 + len(pages), 1.0))
        rows: list[bytes] = await lrange(*where)  # type: ignore[arg-type, misc]
        pages.append(len(rows))
        return rows

    monkeypatch.setattr(redis, "lrange", read)
    found = [one.at for one in await store.recent(-1.0) if one.router == "r"]
    assert found == [float(at) for at in range(10 * PAGE)]
    assert max(pages) == PAGE
    pages.clear()
    since = 9.0 * PAGE
    assert next(one.at for one in await store.recent(since) if one.router == "r") == since + 1
    assert len(pages) <= 4
