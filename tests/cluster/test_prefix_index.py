import asyncio
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster import prefix_index
from baton.cluster.membership import connect
from baton.cluster.prefix_index import PrefixIndex, PrefixPublisher, index_key
from baton.kv.layout import prefix
from baton.launch.redis_server import RedisServer

CHUNK, CHUNKS = 64, 8
CHAIN = [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(9000)]


@pytest.fixture(autouse=True)
def long_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the time of a flush to the test that is about it, however busy the machine is."""
    monkeypatch.setattr(prefix_index, "FLUSH_S", 60.0)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has sets written in small parts."""
    monkeypatch.setattr(prefix_index, "CHUNK", CHUNK)
    monkeypatch.setattr(prefix_index, "CHUNKS", CHUNKS)


def publisher(redis: Redis, worker: str = "w", incarnation: str = "a", ttl_s: float = 5) -> PrefixPublisher:
    return PrefixPublisher(redis, "ns", worker, incarnation, ttl_s)


async def test_the_longest_prefix_of_each_worker_is_found(redis: Redis) -> None:
    for name, blocks in (("none", 0), ("one", 1), ("some", 57), ("all", 200)):
        side = publisher(redis, name)
        side.publish(CHAIN[:blocks], [])
        await side.flush()
    found = await PrefixIndex(redis, "ns").longest(["none", "one", "some", "all", "unknown"], CHAIN[:100])
    assert found == {"none": 0, "one": 1, "some": 57, "all": 100, "unknown": 0}


async def test_a_long_chain_is_one_question(redis: Redis) -> None:
    side = publisher(redis)
    side.publish(CHAIN, [])
    await side.flush()
    index = PrefixIndex(redis, "ns")
    await index.longest(["w"], CHAIN[:1])
    before = (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
    assert await index.longest(["w"], CHAIN) == {"w": 9000}
    assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 1


async def test_no_workers_or_no_blocks_ask_nothing(redis: Redis) -> None:
    index = PrefixIndex(redis, "ns")
    assert await index.longest([], CHAIN[:3]) == {}
    assert await index.longest(["w"], []) == {"w": 0}


async def test_it_expires_with_the_lease(redis: Redis) -> None:
    side = publisher(redis, ttl_s=0.1)
    side.publish(CHAIN[:5], [])
    await side.flush()
    await asyncio.sleep(0.15)
    assert await PrefixIndex(redis, "ns").longest(["w"], CHAIN[:5]) == {"w": 0}


async def test_a_lost_set_is_published_in_full(redis: Redis) -> None:
    side = publisher(redis)
    side.publish(CHAIN[:10], [])
    await side.flush()
    await redis.flushall()
    side.publish(CHAIN[10:12], [])
    await side.flush()
    assert await PrefixIndex(redis, "ns").longest(["w"], CHAIN[:20]) == {"w": 12}


async def test_a_new_incarnation_starts_from_nothing(redis: Redis) -> None:
    old, new = publisher(redis, incarnation="a"), publisher(redis, incarnation="b")
    old.publish(CHAIN[:10], [])
    await old.flush()
    await new.flush()
    assert await PrefixIndex(redis, "ns").longest(["w"], CHAIN[:10]) == {"w": 0}


async def test_it_answers_nothing_while_redis_is_away(redis: Redis, server: RedisServer) -> None:
    side = publisher(redis)
    server.stop()
    assert await PrefixIndex(redis, "ns").longest(["w"], CHAIN[:5]) == {}
    side.publish(CHAIN[:5], [])
    with pytest.raises(RedisError):
        await side.flush()
    server.start()
    await side.flush()
    assert await PrefixIndex(redis, "ns").longest(["w"], CHAIN[:5]) == {"w": 5}


changes = st.lists(st.tuples(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.booleans()), max_size=6)


@settings(max_examples=25, deadline=None)
@given(changes)
def test_the_set_in_redis_is_what_the_worker_holds(
    server: RedisServer, steps: list[tuple[set[int], set[int], bool]]
) -> None:
    """Against the slow obvious version: a Python set, with a flush of Redis now and then."""

    async def play(url: str) -> None:
        redis = connect(url)
        await redis.flushall()
        side, held = publisher(redis), set[int]()
        for added, removed, lost in steps:
            side.publish([CHAIN[i] for i in added], [CHAIN[i] for i in removed])
            held = (held - removed) | added
            if lost:
                await redis.flushall()
            await side.flush()
        members = {m for m in await redis.smembers(index_key("ns", "w")) if len(m) == 16}
        assert members == {CHAIN[i][:16] for i in held}
        await redis.aclose()

    if server.pid is None:
        server.start()
    asyncio.run(play(server.url))


async def test_a_restarted_server_is_filled_again_by_the_next_flush(redis: Redis, server: RedisServer) -> None:
    side = publisher(redis)
    side.publish(CHAIN[:300], [])
    await side.flush()
    server.stop()
    server.start()
    side.publish([], CHAIN[298:300])
    with pytest.raises(RedisError):
        await side.flush()  # over the connection that the server's end broke
    await side.flush()
    assert await PrefixIndex(redis, "ns").longest(["w"], CHAIN) == {"w": 298}


async def test_one_tenants_blocks_are_invisible_to_another(redis: Redis) -> None:
    ours, theirs = (prefix.block_hashes(prefix.root("f", "bf16", salt=s), range(160)) for s in (b"us", b"them"))
    side = publisher(redis)
    side.publish(ours, [])
    await side.flush()
    index = PrefixIndex(redis, "ns")
    assert await index.longest(["w"], ours) == {"w": 10}
    assert await index.longest(["w"], theirs) == {"w": 0}


def block(number: int) -> bytes:
    return number.to_bytes(16, "little")


async def held_in(redis: Redis) -> set[bytes]:
    members = await redis.smembers(index_key("ns", "w"))
    return {member for member in members if not member.startswith(b"incarnation:")}


@pytest.mark.usefixtures("small_parts")
async def test_changes_that_nobody_can_write_are_bounded_and_cost_no_more_with_time(redis: Redis) -> None:
    """A worker evicts as much as it reads, and Redis may be away for hours."""
    side, kept = publisher(redis), [block(number) for number in range(100)]
    side.publish(kept, [])
    await side.flush()
    for number in range(1000, 1000 + 30 * CHUNK * CHUNKS, 500):
        new = [block(n) for n in range(number, number + 500)]
        side.publish(new, [])
        side.publish([], new)
        assert len(side._added) + len(side._removed) <= CHUNK * CHUNKS
    await side.flush()
    assert await held_in(redis) == set(kept)


@pytest.mark.usefixtures("small_parts")
async def test_a_large_set_is_written_over_several_flushes_and_kept_true_meanwhile(redis: Redis) -> None:
    side, count = publisher(redis, ttl_s=60), CHUNK * CHUNKS + 2 * CHUNK
    held = {block(number) for number in range(count)}
    side.publish(list(held), [])
    await side.flush()
    written = await held_in(redis)
    assert len(written) == CHUNK * CHUNKS
    gone = [*list(written)[:10], *list(held - written)[:10]]
    side.publish([b"n" * 16], gone)
    await side.flush()
    await side.flush()
    assert await held_in(redis) == held - set(gone) | {b"n" * 16}


@pytest.mark.usefixtures("small_parts")
async def test_a_set_that_is_lost_again_while_it_is_written_is_written_whole(redis: Redis) -> None:
    side, held = publisher(redis, ttl_s=60), {block(number) for number in range(CHUNK * CHUNKS + 1)}
    side.publish(list(held), [])
    await side.flush()
    await redis.flushall()
    for _ in range(2):
        await side.flush()
    assert await held_in(redis) == held


@pytest.mark.usefixtures("small_parts")
async def test_two_flushes_at_once_write_what_is_held(redis: Redis) -> None:
    side = publisher(redis)
    side.publish([block(number) for number in range(2 * CHUNK)], [])
    first = asyncio.create_task(side.flush())
    await asyncio.sleep(0)
    side.publish([block(2 * CHUNK)], [block(0)])
    await asyncio.gather(first, side.flush())
    assert await held_in(redis) == {block(number) for number in range(1, 2 * CHUNK + 1)}


@pytest.mark.usefixtures("small_parts")
async def test_the_event_loop_turns_while_a_large_set_is_written(redis: Redis) -> None:
    """Streams of tokens go over the same loop; all at once took 1 s for a million blocks."""
    side, turns = publisher(redis, ttl_s=60), 0
    side.publish([block(number) for number in range(CHUNK * CHUNKS)], [])

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    turning = asyncio.create_task(turn())
    await side.flush()
    turning.cancel()
    assert turns > 2 * CHUNKS


@pytest.mark.usefixtures("small_parts")
async def test_a_slow_redis_is_written_to_for_a_time_and_the_rest_later(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's next heartbeat waits for it, and routers forget one that beats no more."""
    side, held = publisher(redis, ttl_s=60), {block(number) for number in range(8 * CHUNK)}
    change, asked = side._change, 0

    async def slow(*args: object, **named: object) -> object:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.02)
        return await change(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(side, "_change", slow)
    monkeypatch.setattr(prefix_index, "FLUSH_S", 0.0)
    side.publish(list(held), [])
    for flush in range(1, 5):
        await side.flush()
        assert asked <= 2 * flush
    assert len(await held_in(redis)) < len(held)
    for _ in range(8):
        await side.flush()
    assert await held_in(redis) == held
    side.publish([block(number) for number in range(90_000, 90_000 + 3 * CHUNK)], list(held)[: 3 * CHUNK])
    for flush in range(4):
        await side.flush()
        if not flush:
            side.publish([], [block(90_000 + 3 * CHUNK - 1)])
    assert await held_in(redis) == side._held
