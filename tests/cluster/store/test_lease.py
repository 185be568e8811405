"""A named lease in Redis: who is cancelled as it takes a turn keeps nobody waiting, and a turn tells whether it was
anybody else's.
"""

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


async def test_a_turn_is_not_sure_once_its_time_has_passed_without_a_renewal(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stands still renews nothing, and finds out before anything else goes on."""
    loop = asyncio.get_running_loop()
    now = loop.time
    async with NamedLease(redis, "t", "roles", "one", 60.0).turn(0.0) as turn:
        assert turn.is_sure
        monkeypatch.setattr(loop, "time", lambda: now() + 60.0)
        assert not turn.is_sure
        monkeypatch.undo()


async def test_a_turn_is_not_sure_if_another_can_have_had_the_lease_before_it_was_renewed(redis: Redis) -> None:
    lease = NamedLease(redis, "t", "roles", "one", 0.3)
    async with asyncio.timeout(30), lease.turn(0.0) as turn:
        await redis.flushdb()
        while turn.is_sure:
            await asyncio.sleep(0.01)
        while not lease.is_sure:  # until it has the lease again
            await asyncio.sleep(0.01)
        assert not turn.is_sure
