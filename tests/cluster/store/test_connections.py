"""A client's connections to a real Redis: shared in turn by more calls than there are, and moved to a successor."""

from __future__ import annotations

import asyncio
import importlib.metadata
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import DriverInfo
from redis.asyncio import Redis
from redis.exceptions import MaxConnectionsError, RedisError

from baton.cluster.membership import Membership, PolledRoster, connect
from baton.cluster.prefix_index import PrefixIndex
from baton.cluster.store import connections
from baton.cluster.store.buckets import RateBuckets
from baton.cluster.store.connections import MOST, WaitingPool
from baton.cluster.store.patience import CircuitBreaker
from baton.launch.redis_server import RedisServer
from tests.cancels import Play, enumerate_cancels
from tests.cluster.test_membership import worker

BURST = 10 * MOST


def pool_of(redis: Redis) -> WaitingPool:
    pool = redis.connection_pool
    assert isinstance(pool, WaitingPool)
    return pool


async def test_all_calls_of_a_burst_are_answered(redis: Redis) -> None:
    """One that were refused a connection would count as a Redis that is away: a rate that nobody keeps to."""
    buckets = RateBuckets(redis, "ns", CircuitBreaker(60.0))
    roster, index = PolledRoster(redis, "ns"), PrefixIndex(redis, "ns")
    await Membership(redis, "ns", worker()).beat()
    takes = (buckets.take({"requests:k": (60.0, 1)}) for _ in range(BURST))
    looks = (index.longest(["prefill-0"], b"-" * 16) for _ in range(BURST))
    answers = await asyncio.gather(roster.refresh(), *takes, *looks)
    taken = answers[1 : BURST + 1]
    assert None not in taken
    assert sum(wait == 0.0 for wait in taken) in range(60, 90)  # more is refilled meanwhile
    assert answers[BURST + 1 :] == [{"prefill-0": 0}] * BURST
    assert roster.connected
    assert len(pool_of(redis)._available_connections) <= MOST


async def test_who_waits_too_long_for_a_connection_is_told(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TURN_S", 0.01)
    pool = pool_of(redis)
    held = [await pool.get_connection() for _ in range(MOST)]
    with pytest.raises(MaxConnectionsError, match="in use"):
        await redis.get("n")
    for one in held:
        await pool.release(one)
    assert await redis.get("n") is None
    assert not pool._waiting


async def test_callers_have_their_turns_in_order(redis: Redis) -> None:
    pool, order = pool_of(redis), list[int]()
    held = [await pool.get_connection() for _ in range(MOST)]

    async def ask(number: int) -> None:
        await redis.get("n")
        order.append(number)

    asking = [asyncio.create_task(ask(number)) for number in range(20)]
    await asyncio.sleep(0)
    await pool.release(held.pop())
    await asyncio.gather(*asking)
    assert order == list(range(20))
    for one in held:
        await pool.release(one)


async def test_a_call_cancelled_anywhere_on_its_way_keeps_no_connection(redis: Redis) -> None:
    pool = pool_of(redis)
    pool.max_connections = 1

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Play]:
        others = [asyncio.create_task(redis.get("n")) for _ in range(2)]

        async def at_rest() -> None:
            await asyncio.gather(*others)
            async with asyncio.timeout(1):
                assert await redis.get("n") is None
            assert not pool._in_use_connections
            assert not pool._waiting

        async def work() -> None:
            last = asyncio.create_task(redis.get("n"))
            others.append(last)
            await redis.get("n")

        yield Play(work, at_rest)

    assert await enumerate_cancels(scenario) > 4


async def test_making_a_connection_reads_no_file(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are made on the event loop, as many at once as a burst has calls, and streams wait meanwhile."""
    read = list[str]()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: read.append(name) or "1")
    DriverInfo()
    assert read, "redis-py reads its own version so, for each connection that it isn't told of"
    read.clear()
    assert pool_of(redis).make_connection()
    assert not read


async def test_a_server_that_became_a_replica_is_left_for_its_successor(redis: Redis, server: RedisServer) -> None:
    """Its address leads to another then; the connections that are open lead to the replica for ever."""
    with tempfile.TemporaryDirectory(prefix="bt-") as name:
        folder = Path(name)
        address, other = folder / "address.sock", RedisServer(folder / "other").start()
        address.symlink_to(server.url.removeprefix("unix://"))
        client, successor = connect(f"unix://{address}"), connect(other.url)
        try:
            await asyncio.gather(*(client.get("n") for _ in range(8)))
            async with Membership(client, "ns", worker(), beat_s=0.02) as member:
                await redis.replicaof("127.0.0.1", "1")
                address.unlink()
                address.symlink_to(other.url.removeprefix("unix://"))
                async with asyncio.timeout(20):
                    while not await successor.exists("{ns}:worker:prefill-0"):
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                assert member.connected
            for number in range(20):  # over any of them
                assert await client.set("n", number)
        finally:
            await redis.replicaof("NO", "ONE")
            await client.aclose()
            await successor.aclose()
            other.stop()


async def test_a_write_refused_within_a_transaction_leaves_the_replica_too(redis: Redis) -> None:
    await redis.replicaof("127.0.0.1", "1")
    try:
        async with redis.pipeline(transaction=True) as pipe:
            pipe.set("n", 1)
            pipe.set("m", 1)
            with pytest.raises(RedisError):
                await pipe.execute()
        assert not any(one.is_connected for one in pool_of(redis)._available_connections)
    finally:
        await redis.replicaof("NO", "ONE")
    assert await redis.set("n", 1)
