import asyncio
import contextlib
import os
import signal

import msgspec
import pytest
from redis.asyncio import Redis

from baton.cluster.membership import LAST_WORDS_S, LEASE_S, Membership, PolledRoster, WorkerEntry, end_task
from baton.launch.redis_server import RedisServer
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import KvLayout, WorkerInfo


def worker(name: str = "prefill-0", incarnation: str = "a") -> WorkerInfo:
    layout = KvLayout("bytes", (), 64, "bytes")
    return WorkerInfo(name, incarnation, "prefill", "127.0.0.1:1", "m", "ff", layout, 100, 100, (), 10)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_member_is_seen_with_its_load(redis: Redis) -> None:
    async with Membership(redis, "ns", worker()) as member:
        member.load = WorkerLoad(running=3, free_pages=7)
        await member.beat()
        seen = await PolledRoster(redis, "ns").refresh()
    assert seen["prefill-0"].info == worker()
    assert seen["prefill-0"].load == WorkerLoad(running=3, free_pages=7)
    assert seen["prefill-0"].age_s < LEASE_S


async def told(redis: Redis, name: str, namespace: str = "ns") -> None:
    """Until Redis has an entry of that worker."""
    async with asyncio.timeout(30):
        while not await redis.exists(f"{{{namespace}}}:worker:{name}"):
            await asyncio.sleep(0.005)


async def test_beats_go_on_by_themselves(redis: Redis) -> None:
    async with Membership(redis, "ns", worker(), beat_s=0.02):
        for _ in range(2):
            await redis.flushall()
            await told(redis, "prefill-0")


async def test_one_that_leaves_is_forgotten_at_the_next_look(redis: Redis) -> None:
    roster = PolledRoster(redis, "ns")
    async with Membership(redis, "ns", worker()):
        assert await roster.refresh()
    assert await roster.refresh() == {}


async def test_namespaces_do_not_meet(redis: Redis) -> None:
    async with Membership(redis, "one", worker()):
        assert await PolledRoster(redis, "two").refresh() == {}


async def test_one_whose_lease_ran_out_ages_and_is_forgotten(redis: Redis) -> None:
    clock = Clock()
    roster = PolledRoster(redis, "ns", forget_s=10, clock=clock)
    member = Membership(redis, "ns", worker(), ttl_s=60)
    await member.beat()
    await roster.refresh()
    await redis.delete("{ns}:worker:prefill-0")
    clock.now += 5
    assert (await roster.refresh())["prefill-0"].age_s == pytest.approx(5, abs=4)
    clock.now += 6
    assert await roster.refresh() == {}


async def test_a_restart_replaces_the_entry(redis: Redis) -> None:
    roster = PolledRoster(redis, "ns")
    await Membership(redis, "ns", worker(incarnation="a")).beat()
    await Membership(redis, "ns", worker(incarnation="b")).beat()
    assert (await roster.refresh())["prefill-0"].info.incarnation == "b"


async def test_a_flushed_redis_is_filled_again_by_the_next_beats(redis: Redis) -> None:
    roster = PolledRoster(redis, "ns")
    member = Membership(redis, "ns", worker())
    await member.beat()
    await roster.refresh()
    await redis.flushall()
    assert "prefill-0" in await roster.refresh(), "a missing key is not a dead worker"
    await member.beat()
    assert (await roster.refresh())["prefill-0"].age_s < LEASE_S


async def test_the_last_view_stays_while_redis_is_away(redis: Redis, server: RedisServer) -> None:
    clock = Clock()
    roster, member = PolledRoster(redis, "ns", clock=clock), Membership(redis, "ns", worker())
    await member.beat()
    await roster.refresh()
    server.stop()
    clock.now += 60
    assert not await member.beat()
    assert (await roster.refresh())["prefill-0"].age_s == pytest.approx(60, abs=LEASE_S)
    assert not roster.connected
    assert not member.connected
    assert roster.away_s == 0.0
    clock.now += 7
    await roster.refresh()
    assert roster.away_s == 7.0
    server.start()
    assert await member.beat()
    assert (await roster.refresh())["prefill-0"].age_s < LEASE_S
    assert roster.connected
    assert member.connected
    assert roster.away_s is None


async def test_one_that_leaves_waits_for_a_redis_that_hangs_only_once(redis: Redis, server: RedisServer) -> None:
    """The time in which a worker has to be gone is for its requests, its ports and its engine."""
    assert server.pid is not None
    member, now = Membership(redis, "ns", worker(), beat_s=0.05), asyncio.get_running_loop().time
    await member.__aenter__()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(0.1)  # its heartbeat hangs, too
        began = now()
        await member.announce_end(msgspec.structs.replace(member.info, state="draining"))
        await member.depart("drained", "told to stop")
        await member.__aexit__()
        took = now() - began
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert took < 2 * LAST_WORDS_S


async def test_an_entry_nobody_can_read_is_skipped(redis: Redis) -> None:
    await Membership(redis, "ns", worker("decode-0")).beat()
    await Membership(redis, "ns", worker()).beat()
    await redis.hset("{ns}:worker:prefill-0", "info", msgspec.msgpack.encode({"worker_id": 3}))
    assert set(await PolledRoster(redis, "ns").refresh()) == {"decode-0"}


async def test_beats_and_looks_go_on_after_one_that_stumbled(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stopped would never be heard of again, or never hear of a worker that came back."""
    beat, refresh, stumbled = Membership.beat, PolledRoster.refresh, list[str]()

    async def stumbling_beat(self: Membership) -> bool:
        if len(stumbled) < 2:
            stumbled.append("beat")
            raise ValueError("a mistake of ours")
        return await beat(self)

    async def stumbling_refresh(self: PolledRoster) -> dict[str, WorkerEntry]:
        if len(stumbled) < 4:
            stumbled.append("look")
            raise ValueError("a mistake of ours")
        return await refresh(self)

    async with Membership(redis, "ns", worker(), beat_s=0.02), PolledRoster(redis, "other", poll_s=0.02) as roster:
        monkeypatch.setattr(Membership, "beat", stumbling_beat)
        await counted(stumbled, 2)
        monkeypatch.setattr(PolledRoster, "refresh", stumbling_refresh)
        await Membership(redis, "other", worker("decode-0")).beat()
        await counted(stumbled, 4)
        async with asyncio.timeout(30):
            while "decode-0" not in roster.snapshot():
                await asyncio.sleep(0.005)
        await redis.flushall()
        await told(redis, "prefill-0")
    assert stumbled == ["beat", "beat", "look", "look"]


async def counted(stumbled: list[str], count: int) -> None:
    async with asyncio.timeout(30):
        while len(stumbled) < count:
            await asyncio.sleep(0.005)


async def test_leaving_never_waits_for_a_cancellation_that_redis_swallowed(redis: Redis) -> None:
    """redis-py loses one that meets the end of a write; a worker waiting for it would never give its slot back."""
    for turns in range(60):
        member, roster = Membership(redis, "ns", worker(), beat_s=0.0), PolledRoster(redis, "ns", poll_s=0.0)
        async with asyncio.timeout(30), member, roster:
            for _ in range(turns):
                await asyncio.sleep(0)


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    async def deaf() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await end_task(task)
    assert task.cancelled()


async def test_a_cancel_in_any_turn_of_a_call_to_redis_is_heeded_and_the_next_call_gets_its_own_answer(
    redis: Redis,
) -> None:
    await redis.set("n", "1")
    heeded = 0
    for turns in range(40):
        task = asyncio.create_task(redis.get("n"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled(), f"a cancel after {turns} turns was lost"
            heeded += 1
        assert await redis.set("n", "1") is True
    assert heeded > 3


async def test_a_command_is_written_in_the_turn_in_which_it_is_asked(redis: Redis) -> None:
    """redis-py takes a task of its own for it, and so two turns of a loop in which much else may wait."""
    await redis.set("n", "1")
    (connection,) = redis.connection_pool._available_connections  # type: ignore[attr-defined]
    written: list[bytes] = []
    writer = connection._writer
    told, connection._writer.writelines = writer.writelines, lambda parts: (written.extend(parts), told(parts))
    turns = 0
    asking = asyncio.create_task(redis.get("n"))
    while not written:
        await asyncio.sleep(0)
        turns += 1
    assert await asking == b"1"
    assert turns <= 1
