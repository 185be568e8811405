"""Holds of operators, over a real Redis: they stay through its restart until somebody puts the worker back."""

from __future__ import annotations

from redis.asyncio import Redis

from baton.cluster.holds import HoldStore, RosterWithHolds, SlotHold
from baton.cluster.membership import Membership, PolledRoster
from tests.cluster.test_membership import worker

EJECTED = SlotHold("eject", "somebody", 1.0)


def held(redis: Redis) -> RosterWithHolds:
    return RosterWithHolds(PolledRoster(redis, "ns"), HoldStore(redis, "ns"))


async def state(roster: RosterWithHolds, redis: Redis) -> str:
    await Membership(redis, "ns", worker()).beat()
    return (await roster.refresh())["prefill-0"].info.state


async def test_a_worker_that_was_taken_out_stays_out_when_redis_restarts_empty(redis: Redis) -> None:
    known = held(redis)
    await known.store.put("prefill-0", EJECTED)
    assert await state(known, redis) == "draining"
    await redis.flushall()
    assert await state(known, redis) == "draining"
    assert await state(held(redis), redis) == "draining", "a router that starts later hears of it"
    assert await HoldStore(redis, "ns").all() == {"prefill-0": EJECTED}


async def test_a_worker_that_was_put_back_is_not_taken_out_by_a_router_that_missed_it(redis: Redis) -> None:
    one, two = held(redis), held(redis)
    await one.store.put("prefill-0", EJECTED)
    for roster in (one, two):
        assert await state(roster, redis) == "draining"
    await one.store.put("prefill-0", None)
    for roster in (two, one):
        assert await state(roster, redis) == "ready"
    await one.store.put("prefill-0", EJECTED)
    assert await state(two, redis) == "draining"
    await redis.flushall()
    await one.store.put("prefill-0", None)
    assert await state(two, redis) == "ready"


async def test_what_an_earlier_version_put_back_is_not_taken_out_again(redis: Redis) -> None:
    """An earlier version leaves no trace of the last hold that it removes."""
    known = held(redis)
    await redis.hset("{ns}:holds", "prefill-0", '{"how": "drain"}')
    assert await state(known, redis) == "standby"
    await redis.hdel("{ns}:holds", "prefill-0")
    assert await state(known, redis) == "ready"
