"""The list of pinned prefixes, over a real Redis."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from baton.cluster.prefix_pins import PinnedPrefix, PrefixPinStore
from baton.protos.errors import Unavailable


def pin(name: str, created: float) -> PinnedPrefix:
    return PinnedPrefix(name, "a", "m", 32, created, created + 60.0, {"prefill-0": 32})


async def test_entries_are_listed_the_oldest_first_until_they_are_removed(redis: Redis) -> None:
    store, other = PrefixPinStore(redis, "ns"), PrefixPinStore(redis, "other")
    for name, created in (("late", 20.0), ("early", 10.0)):
        await store.put(pin(name, created), 60.0)
    assert await store.all() == [pin("early", 10.0), pin("late", 20.0)]
    assert await other.all() == []
    await store.remove("early")
    await store.remove("unknown")
    assert await store.all() == [pin("late", 20.0)]


async def test_an_entry_ends_by_redis_clock_whatever_wall_clocks_its_router_had(redis: Redis) -> None:
    store = PrefixPinStore(redis, "ns")
    await store.put(pin("of a clock that is behind", -1e6), 60.0)
    await store.put(pin("of a clock that is ahead", 1e12), 0.02)
    async with asyncio.timeout(30):
        while len(await store.all()) == 2:
            await asyncio.sleep(0.01)
    assert [one.id for one in await store.all()] == ["of a clock that is behind"]
    assert await redis.smembers("{ns}:prefix-pins:ids") == {b"of a clock that is behind"}


async def test_an_entry_of_another_version_is_passed_over(redis: Redis) -> None:
    store = PrefixPinStore(redis, "ns")
    await store.put(pin("ours", 1.0), 60.0)
    await redis.sadd("{ns}:prefix-pins:ids", "theirs")
    await redis.set("{ns}:prefix-pin:theirs", "nonsense")
    assert await store.all() == [pin("ours", 1.0)]


async def test_without_redis_a_typed_error_says_so() -> None:
    store = PrefixPinStore(Redis(host="127.0.0.1", port=1, retry=Retry(NoBackoff(), 0)), "ns")
    for asked in (store.all(), store.put(pin("p", 1.0), 60.0), store.remove("p")):
        with pytest.raises(Unavailable, match="Redis is away"):
            await asked
