"""A named lease in Redis: who is cancelled as it takes a turn keeps nobody waiting."""

import asyncio

import pytest
from redis.asyncio import Redis

from baton.cluster.store.lease import NamedLease


async def test_who_is_cancelled_as_it_takes_its_turn_leaves_it_to_others(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has given it by then, for as long as a turn outlasts its router."""
    first, other = (NamedLease(redis, "t", "roles", who, 60.0) for who in ("one", "two"))
    hold, given = first._hold, asyncio.Event()

    async def late(**asked: object) -> object:
        held = await hold(**asked)
        given.set()
        await asyncio.sleep(60)
        return held

    monkeypatch.setattr(first, "_hold", late)

    async def turn() -> None:
        async with first.turn(60.0):
            raise AssertionError("it was cancelled before")

    asking = asyncio.create_task(turn())
    await asyncio.wait_for(given.wait(), 30)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    async with asyncio.timeout(30), other.turn(0.0):
        pass
