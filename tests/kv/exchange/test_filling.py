"""Fetch from end to end without sockets: what arrives is verified, what fails is left to compute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.exchange import source as sources
from baton.kv.exchange.fetch import BlockFetcher
from baton.kv.exchange.source import FetchedPage
from baton.protos.errors import LayoutMismatch, ModelNotFound, WorkerLost
from tests.kv.sharers import LAYOUT, Sharer, chain, content, settle

CHAIN = chain(40)


def of(holder: Sharer):
    """The holder's cache as a source."""

    async def blocks(hashes: tuple[bytes, ...]) -> AsyncGenerator[FetchedPage, None]:
        async for page in holder.source.fetch("m", hashes, LAYOUT):
            yield page

    return blocks


async def test_blocks_of_one_worker_become_findable_at_another():
    holder, asker = Sharer(), Sharer()
    holder.compute(CHAIN[:30])
    asker.compute(CHAIN[:4])
    report = await asker.filler.fill(CHAIN[:25], of(holder))
    await settle()
    assert (report.held, report.blocks, report.bytes) == (4, 21, 21 * LAYOUT.page_bytes)
    assert asker.holds(CHAIN) == 25
    assert holder.at_baseline()
    assert asker.at_baseline()


async def test_a_source_that_holds_less_than_was_said_gives_what_it_has():
    holder, asker = Sharer(), Sharer()
    holder.compute(CHAIN[:7])
    assert (await asker.filler.fill(CHAIN[:20], of(holder))).blocks == 7
    await settle()
    assert asker.holds(CHAIN) == 7
    assert asker.at_baseline()


def damaged(page: FetchedPage, how: str) -> FetchedPage:
    if how == "a bit":
        return msgspec.structs.replace(page, data=bytes([page.data[0] ^ 1]) + page.data[1:])
    if how == "the hash":
        return msgspec.structs.replace(page, hash=CHAIN[39])
    return msgspec.structs.replace(page, data=page.data[:-1])


@pytest.mark.parametrize("how", ["a bit", "the hash", "the size"])
async def test_a_wrong_block_is_refused_and_those_before_it_are_kept(how):
    holder, asker = Sharer(), Sharer()
    holder.compute(CHAIN[:10])

    async def spoilt(hashes):
        at = 0
        async for page in of(holder)(hashes):
            yield damaged(page, how) if at == 6 else page
            at += 1

    assert (await asker.filler.fill(CHAIN[:10], spoilt)).blocks == 6
    await settle()
    assert (asker.holds(CHAIN), asker.filler.failures) == (6, 1)
    assert asker.at_baseline()


async def test_a_source_that_stalls_or_dies_costs_no_more_than_the_wait():
    holder, asker = Sharer(), Sharer()
    holder.compute(CHAIN[:10])

    async def stalls(hashes):
        async for page in of(holder)(hashes[:3]):
            asker.filler._stall_s = 0.1 if page.hash == hashes[2] else 60.0  # after the third nothing comes
            yield page
        await asyncio.sleep(3600)

    async def dies(hashes):
        async for page in of(holder)(hashes[:3]):
            yield page
        raise WorkerLost("gone")

    for source, held in ((stalls, 3), (dies, 6)):
        asker.filler._stall_s = 60.0
        await asyncio.wait_for(asker.filler.fill(CHAIN[:10], source), 30)
        await settle()
        assert asker.holds(CHAIN) == held
        assert asker.at_baseline()
        assert holder.at_baseline()
    assert asker.filler.failures == 2


async def test_a_source_that_takes_longer_than_computing_is_left_with_what_it_gave():
    holder = Sharer()
    holder.compute(CHAIN[:10])

    async def slow(hashes):
        async for page in of(holder)(hashes[:3]):
            yield page
        await asyncio.Event().wait()

    for limit_s in (0.3, 3.0, 30.0):  # the longer ones on a machine on which three blocks take longer
        asker = Sharer()
        report = await asker.filler.fill(CHAIN[:10], slow, limit_s=limit_s)
        await settle()
        if report.blocks == 3:
            break
    assert report.blocks == 3
    assert asker.holds(CHAIN) == report.blocks
    assert asker.at_baseline()
    assert holder.at_baseline()


async def test_nobody_at_the_address_is_a_failed_fill_only():
    asker, fetcher = Sharer(), BlockFetcher("m", LAYOUT)
    assert (await asker.filler.fill(CHAIN[:4], partial(fetcher.blocks, "127.0.0.1:1"))).blocks == 0
    await settle()
    assert asker.filler.failures == 1
    assert asker.at_baseline()
    await fetcher.close()


async def test_many_that_want_the_same_blocks_fetch_them_once():
    holder, asker = Sharer(), Sharer()
    holder.compute(CHAIN[:20])
    reports = await asyncio.gather(*(asker.filler.fill(CHAIN[:20], of(holder)) for _ in range(8)))
    await settle()
    assert sorted(report.blocks for report in reports) == [0] * 7 + [20]
    assert holder.source.served_blocks == 20
    assert asker.holds(CHAIN) == 20
    assert asker.at_baseline()


async def test_the_next_one_tries_itself_when_the_first_was_cancelled():
    holder, asker = Sharer(), Sharer()
    holder.compute(CHAIN[:20])
    first = asyncio.create_task(asker.filler.fill(CHAIN[:20], of(holder)))
    second = asyncio.create_task(asker.filler.fill(CHAIN[:20], of(holder)))
    await asyncio.sleep(0)
    first.cancel()
    report = await second
    assert report.held + report.blocks == 20
    await settle()
    assert asker.at_baseline()
    assert holder.at_baseline()


async def test_a_full_pool_takes_nothing_and_nothing_is_evicted_for_it():
    holder, asker = Sharer(), Sharer(pages=16)
    holder.compute(CHAIN[:10])
    with asker.pool.open([], 10):
        assert (await asker.filler.fill(CHAIN[:6], of(holder))).blocks == 0
    await settle()
    assert asker.at_baseline()


async def test_a_fill_that_is_cancelled_keeps_what_came_and_writes_no_more():
    holder, asker = Sharer(), Sharer()
    holder.compute(CHAIN[:10])
    fetched, go_on = asyncio.Event(), asyncio.Event()

    async def slow(hashes):
        async for page in of(holder)(hashes):
            yield page
            fetched.set()
            await go_on.wait()

    filling = asyncio.create_task(asker.filler.fill(CHAIN[:10], slow))
    await fetched.wait()
    filling.cancel()
    await asyncio.gather(filling, return_exceptions=True)
    go_on.set()
    await settle()
    assert asker.holds(CHAIN) == 1
    assert asker.at_baseline()
    assert holder.at_baseline()


async def test_an_engine_that_dies_ends_fills_and_fetches():
    worker = Sharer()
    worker.compute(CHAIN[:5])
    worker.deaf = True
    filling = asyncio.create_task(worker.filler.fill(CHAIN[:5], of(worker)))
    fetching = asyncio.create_task(anext(worker.source.fetch("m", tuple(CHAIN[:5]), LAYOUT)))
    await settle()
    worker.filler.lost(WorkerLost("the engine died"))
    worker.source.lost(WorkerLost("the engine died"))
    assert (await filling).blocks == 0
    with pytest.raises(WorkerLost):
        await fetching
    assert (await worker.filler.fill(CHAIN[:5], of(worker))).blocks == 0


async def test_another_model_or_layout_is_refused_by_name():
    holder = Sharer()
    with pytest.raises(ModelNotFound, match="serves 'm', not 'other'"):
        await anext(holder.source.fetch("other", tuple(CHAIN[:2]), LAYOUT))
    other = msgspec.structs.replace(LAYOUT, dtype="float32")
    with pytest.raises(LayoutMismatch, match="dtype"):
        await anext(holder.source.fetch("m", tuple(CHAIN[:2]), other))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 20), st.integers(0, 2)), max_size=12)
)
def test_any_mix_of_fills_leaves_each_page_with_one_owner(steps):
    """Three small caches that compute, evict and fetch from each other at once."""

    async def play() -> None:
        workers = [Sharer(pages=24) for _ in range(3)]
        chains = [chain(20, salt) for salt in range(3)]
        fills = []
        for holder, asker, blocks, salt in steps:
            if holder == asker:
                if workers[holder].pool.available >= blocks:
                    workers[holder].compute(chains[salt][:blocks])
            else:
                work = partial(workers[asker].filler.fill, chains[salt][:blocks], of(workers[holder]))
                fills.append(asyncio.create_task(work()))
            await asyncio.sleep(0)
        await asyncio.gather(*fills)
        await settle()
        for worker in workers:
            assert worker.at_baseline()
            for known in chains:
                worker.holds(known)

    asyncio.run(play())


async def test_a_cancellation_that_meets_a_block_is_heeded():
    """``asyncio.wait_for`` swallows it until Python 3.12."""
    holder, asker = Sharer(), Sharer()
    holder.compute(CHAIN[:20])
    filling: asyncio.Task

    async def meets(hashes):
        at = 0
        async for page in of(holder)(hashes):
            at += 1
            if at == 5:
                asyncio.get_running_loop().call_soon(filling.cancel)
                await asyncio.sleep(0)
            yield page

    filling = asyncio.ensure_future(asker.filler.fill(CHAIN[:20], meets))
    with pytest.raises(asyncio.CancelledError):
        await filling
    await settle()
    assert asker.holds(CHAIN) < 20
    assert asker.at_baseline()


async def test_an_engine_that_goes_while_blocks_are_lifted_leaves_nobody_waiting():
    holder = Sharer()

    async def lift(hashes):
        holder.source.lost(WorkerLost("the engine is gone"))
        return 0

    holder.source._lift = lift
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(anext(holder.source.fetch("m", tuple(CHAIN[:3]), LAYOUT)), 30)


@pytest.mark.parametrize("limit", ["STALL_S", "PINNED_S"])
async def test_a_reader_that_stalls_or_dawdles_holds_no_page_for_long_and_gets_an_early_end(monkeypatch, limit):
    monkeypatch.setattr(sources, limit, 0.03)
    holder = Sharer()
    holder.compute(CHAIN[:10])
    pages = holder.source.fetch("m", tuple(CHAIN[:10]), LAYOUT)
    got = [await anext(pages)]
    assert not holder.at_baseline()
    if limit == "STALL_S":
        async with asyncio.timeout(20):
            while not holder.at_baseline():
                await asyncio.sleep(0.001)
    async for page in pages:
        got.append(page)
        await asyncio.sleep(0.01)
    assert 1 <= len(got) < 10
    assert [page.data for page in got] == [content(page.hash) for page in got]
    await settle()
    assert holder.at_baseline()


async def test_a_fill_that_follows_another_keeps_the_limit_and_reports_what_it_brought():
    holder, asker = Sharer(), Sharer()
    holder.compute(CHAIN[:10])

    async def slow(hashes):
        async for page in of(holder)(hashes[:3]):
            yield page
        await asyncio.Event().wait()

    for limit_s in (0.3, 3.0, 30.0):  # the longer ones on a machine on which the blocks take longer
        asker = Sharer()
        then = partial(asker.filler.load, CHAIN[:8], asker.filler.verified(slow))
        report = await asker.filler.load(CHAIN[8:10], asker.filler.verified(of(holder)), limit_s, then)
        await settle()
        if report.blocks == 5:
            break
    assert (report.blocks, report.bytes, report.failed) == (5, 5 * LAYOUT.page_bytes, True)
    assert asker.filler.failures == 1
    assert asker.at_baseline()
