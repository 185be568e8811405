"""A store that files have filled: it refuses the next one by name, loses nothing, and everything else goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from baton.cluster.batch_nouns import BatchJob, ListPage, StoredFile
from baton.cluster.batch_store import BatchStore
from baton.cluster.membership import Membership, PolledRoster
from baton.cluster.store.buckets import RateBuckets
from baton.cluster.store.lease import NamedLease
from baton.cluster.store.patience import CircuitBreaker
from baton.cluster.store.records import RecordStore
from baton.cluster.store.room import RedisMemory
from baton.cluster.store.slot_lease import SlotLease
from baton.protos.errors import StorageFull
from tests.router.fake_services import info

MEMORY = 12 << 20
FILE = 256 << 10


@pytest.fixture
async def small(redis: Redis) -> AsyncIterator[Redis]:
    """The real server with little memory, under the policy that a cluster's own server has."""
    most = (await redis.config_get("maxmemory"))["maxmemory"]
    await redis.config_set("maxmemory", (await redis.info("memory"))["used_memory"] + MEMORY)
    await redis.config_resetstat()
    yield redis
    await redis.config_set("maxmemory", most)


async def fill(store: BatchStore) -> list[StoredFile]:
    """Upload, each by a tenant of its own, until the store has no room."""
    kept: list[StoredFile] = []
    while len(kept) * FILE < 2 * MEMORY:
        file = StoredFile(f"file-{len(kept)}", f"tenant-{len(kept)}", "x", "batch", FILE, 1)
        try:
            await store.add_file(file, bytes([len(kept)]) * FILE, FILE)
        except StorageFull:
            return kept
        kept.append(file)
    raise AssertionError("the store took twice of what it has")


async def test_a_full_store_refuses_files_and_nothing_else(small: Redis) -> None:
    store, worker = BatchStore(small, "t"), info("d0", "decode")
    slot, lease = (
        SlotLease(small, "t", "d0", "me", "here", 600.0),
        NamedLease(small, "t", "controller", "me", 600.0),
    )
    buckets, member, records = (
        RateBuckets(small, "t", CircuitBreaker(60.0)),
        Membership(small, "t", worker),
        RecordStore(small, "t"),
    )
    assert await slot.take() == ""
    assert await lease.hold()
    assert await member.beat()
    assert await buckets.take({"key": (60, 60)}) == 0.0
    job = BatchJob("batch_1", "a", "/v1/completions", "file-0", "24h", 1, 1)
    await store.put(job, is_open=True)
    kept = await fill(store)
    assert len(kept) > 10
    await records.put({f"r{n}": b"x" * 5000 for n in range(2000)})  # ten megabytes, and not all have room
    with pytest.raises(StorageFull, match=r"no room .* delete files"):
        await BatchStore(small, "t").put(job, is_open=True)

    assert (await small.info("stats"))["evicted_keys"] == 0
    assert await slot.keep()
    assert await lease.hold()
    assert await member.beat()
    assert (await PolledRoster(small, "t").refresh()).keys() == {"d0"}
    assert await buckets.take({"key": (60, 60)}), "the rate that was used up still is"
    for number, file in enumerate(kept):
        assert await store.content(file.id) == bytes([number]) * FILE
    claim = await store.claim(job.id, "lane", 600.0)
    await store.answer(claim, 0, b"{}", True)
    assert await store.answers(job.id, True) == {0: b"{}"}

    for file in kept:
        await store.drop_file(file)
    again = BatchStore(small, "t")
    assert await again.add_file(kept[0], b"x" * FILE, FILE) is None
    assert len((await again.files(ListPage()))[0]) <= 1


async def test_records_keep_to_their_share_and_the_oldest_make_room(redis: Redis) -> None:
    store = RecordStore(redis, "t", kept_s=60, most_bytes=20_000)
    for number in range(50):
        await store.put({f"r{number}": b"x" * 1000, "same": b"y" * (number + 1)})
    held = [number for number in range(50) if await store.get(f"r{number}")]
    assert held == list(range(held[0], 50))
    assert 10 <= len(held) <= 20
    assert await store.get("same") == b"y" * 50
    assert int(await redis.get("{t}:requests:bytes")) <= 20_000
    await store.put({f"r{number}": b"" for number in held})
    assert int(await redis.get("{t}:requests:bytes")) < 10_000


async def test_a_server_without_a_limit_or_without_a_word_is_never_full(redis: Redis) -> None:
    class Silent(Redis):
        async def info(self, *_: object):
            raise NoPermissionError("this user has no permissions to run the 'info' command")

    assert await RedisMemory(Silent()).has(1 << 40, 0.5)
    most = (await redis.config_get("maxmemory"))["maxmemory"]
    await redis.config_set("maxmemory", 0)
    try:
        assert await RedisMemory(redis).has(1 << 40, 0.5)
    finally:
        await redis.config_set("maxmemory", most)
