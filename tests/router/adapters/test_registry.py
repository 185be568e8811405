"""Tests what a router serves by name: the configuration's adapters, what Redis says, and Redis gone or flushed."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from redis.asyncio import Redis

from baton.cluster import adapters as store_module
from baton.cluster.adapters import AdapterEntry, AdapterStore
from baton.protos.errors import Unavailable
from baton.router.adapters.registry import LOOK_AGAIN_S, RETIRED_S, AdapterRegistry, served_of

ONE, TWO = "1" * 16, "2" * 16
OF_CONFIG = AdapterEntry("style", "m", "/srv/style", by="config")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += LOOK_AGAIN_S  # so that each look is one
        return self.now


def sql(digest: str = ONE, **fields) -> AdapterEntry:
    return AdapterEntry("sql", "m", "sql", digest, **fields)


def registry(redis: Redis, *configured: AdapterEntry) -> AdapterRegistry:
    return AdapterRegistry(configured, AdapterStore(redis, "ns"), Clock())


async def test_what_one_router_writes_another_serves(redis):
    first, second = registry(redis), registry(redis)
    assert await first.put(sql(tenant="t", pinned=True))
    assert second.served() == {}
    await second.look()
    assert second.served() == first.served() == {"sql": sql(tenant="t", pinned=True)}
    assert second.of_id(f"sql@{ONE}") == second.served()["sql"]


async def test_of_two_routers_that_write_at_once_one_is_told_so(redis):
    first, second = registry(redis), registry(redis)
    assert await first.put(sql())
    assert not await second.put(sql(TWO))
    assert second.served()["sql"].digest == ONE
    assert await second.put(sql(TWO))


@pytest.mark.parametrize("removed", [False, True])
async def test_a_look_that_read_before_a_write_does_not_undo_it(redis, removed):
    read, go_on = asyncio.Event(), asyncio.Event()

    class Slow(AdapterStore):
        async def forget_notes(self, entries):
            read.set()
            await go_on.wait()

    here = AdapterRegistry((), Slow(redis, "ns"), Clock())
    if removed:
        assert await here.put(sql())
    looking = asyncio.create_task(here.look())
    await read.wait()
    assert await here.put(sql(removed=removed))
    go_on.set()
    await looking
    assert here.served() == ({} if removed else {"sql": sql()})


async def test_a_restarted_router_finds_what_was_added(redis):
    await registry(redis).put(sql())
    again = registry(redis, OF_CONFIG)
    assert not again.is_complete
    await again.begin()
    assert again.is_complete
    assert list(again.served()) == ["sql", "style"]


async def test_without_redis_the_configurations_adapters_are_served_and_nothing_is_changed(server):
    from baton.cluster.membership import connect

    client = connect("redis://127.0.0.1:1")
    away = AdapterRegistry([OF_CONFIG], AdapterStore(client, "ns"), Clock())
    await away.begin()
    await away.look()
    assert list(away.served()) == ["style"]
    assert not away.is_complete
    with pytest.raises(Unavailable, match="Redis is away"):
        await away.put(sql())
    assert list(away.served()) == ["style"]
    await client.aclose()


async def test_a_flushed_redis_is_written_again_by_whoever_remembers(redis):
    known = registry(redis, OF_CONFIG)
    await known.put(sql())
    gone = msgspec.structs.replace(sql(), name="old", removed=True)
    await known.put(gone)
    await redis.flushall()
    await known.look()
    fresh = registry(redis, OF_CONFIG)
    await fresh.look()
    assert list(fresh.served()) == ["sql", "style"]


async def test_a_flushed_redis_does_not_bring_back_what_was_taken_out_of_the_configuration(redis):
    known = registry(redis, OF_CONFIG)
    await known.put(msgspec.structs.replace(OF_CONFIG, removed=True))
    await redis.flushall()
    await known.look()
    assert known.served() == {}
    fresh = registry(redis, OF_CONFIG)
    await fresh.look()
    assert fresh.served() == {}


async def test_the_last_name_that_was_removed_stays_removed(redis):
    first, second = registry(redis), registry(redis)
    await first.put(sql())
    await second.look()
    await first.put(sql(removed=True))
    await second.look()
    await second.look()
    assert first.served() == second.served() == {}
    assert second.retired()[f"sql@{ONE}"].readable


async def test_a_configured_adapter_can_be_taken_out_and_put_back(redis):
    known = registry(redis, OF_CONFIG)
    known.learn("style", ONE)
    await known.put(msgspec.structs.replace(known.served()["style"], removed=True))
    assert known.served() == {}
    await known.put(AdapterEntry("style", "m", "style", TWO))
    assert known.served()["style"].adapter_id == f"style@{TWO}"


async def test_notes_of_removed_names_are_bounded(redis, monkeypatch):
    monkeypatch.setattr(store_module, "NOTES", 2)
    known = registry(redis)
    for at in range(5):
        await known.put(AdapterEntry(f"a{at}", "m", "x", ONE, at=float(at), removed=True))
    await known.look()
    assert sorted(await AdapterStore(redis, "ns").all()) == ["a3", "a4"]


async def test_a_name_that_is_served_again_is_not_forgotten_with_its_note(redis, monkeypatch):
    monkeypatch.setattr(store_module, "NOTES", 0)
    store, known = AdapterStore(redis, "ns"), registry(redis)
    await known.put(sql(removed=True))
    seen = (await store.all()).values()
    await known.put(sql(TWO))
    await store.forget_notes(seen)
    assert (await store.all())["sql"].digest == TWO


async def test_an_entry_of_a_later_version_is_skipped_and_not_lost(redis):
    await redis.hset("{ns}:adapters", "odd", b"\xff")
    await registry(redis).put(sql())
    later = registry(redis)
    await later.look()
    assert list(later.served()) == ["sql"]
    assert await redis.hexists("{ns}:adapters", "odd")


async def test_a_replaced_content_is_kept_for_its_requests_and_then_overdue():
    clock = Clock()
    known = AdapterRegistry(clock=clock)
    await known.put(sql())
    await known.put(sql(TWO))
    old = f"sql@{ONE}"
    assert known.of_id(old) == sql()
    assert not known.is_readable(old)  # another content lies at its path
    assert known.overdue(()) == []
    clock.now += RETIRED_S
    assert known.overdue({old}) == []
    assert known.overdue(()) == [old]
    known.forget(old)
    assert known.of_id(old) is None


async def test_a_content_that_is_served_again_is_no_longer_retired():
    known = AdapterRegistry()
    await known.put(sql())
    await known.put(sql(removed=True))
    assert known.retired()
    await known.put(sql())
    assert not known.retired()
    assert known.is_readable(f"sql@{ONE}")


def test_the_shared_registry_comes_before_the_configuration():
    other = AdapterEntry("style", "m", "elsewhere", TWO)
    assert served_of({"style": OF_CONFIG}, {"style": ONE}, {})["style"].digest == ONE
    assert served_of({"style": OF_CONFIG}, {"style": ONE}, {"style": other}) == {"style": other}
