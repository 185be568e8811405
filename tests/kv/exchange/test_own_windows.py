"""Blocks of several pages, some of layers with a window: what a prefix needs is fetched, lifted, shared and pinned
with it, or nothing is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from baton.kv.exchange.source import FetchedPage
from baton.kv.exchange.warming import BlockKind, LowerTiers, Warmer
from baton.kv.layout import prefix
from baton.kv.layout.room import window_bytes
from baton.kv.pages.tables import deepest, seen_behind, table_hash
from baton.kv.tiers import shared
from baton.kv.tiers.blobs import meaning_of
from baton.kv.tiers.folder import FolderStore
from baton.kv.tiers.holdings import Holdings
from baton.kv.tiers.memory import host_slab
from baton.kv.tiers.shared import SharedTier
from baton.kv.tiers.stack import Tier, Tiers
from baton.kv.tiers.writeback import WriteBack
from baton.protos.errors import PinsFull
from baton.protos.nouns import EngineRequest, Sampling
from baton.worker.cache.pins import PrefixPins
from tests.kv.sharers import LAYOUT, PAGE, Sharer, chain, settle

WINDOWS, BLOCKS = (0, 40, 70), 12
PROMPT = tuple(range(16 * BLOCKS + 1))
REQUEST = EngineRequest("r", PROMPT, len(PROMPT), Sampling())
CHAIN = prefix.block_hashes(prefix.root("f", "test"), PROMPT)[:BLOCKS]
SEEN = 3 + 5  # pages that the token after the prompt's blocks sees, of tables 1 and 2
NAMES = [table_hash(block, number) for number in (1, 2) for block in CHAIN]


class Worker(Sharer):
    """A device over a host tier and, with ``store``, one that workers share; it fetches from ``other``."""

    def __init__(self, other: Sharer | None = None, store: FolderStore | None = None, pages: int = 64) -> None:
        super().__init__(pages)
        self.other, self.damaged = other, b""
        self.pool.watch_idle()
        slab = host_slab(200 * (PAGE + 64), PAGE)
        assert slab is not None
        self.tiers = Tiers([Tier("host", slab)] if store is None else [])
        self.holdings = Holdings(self.tiers)
        self.shared = None if store is None else SharedTier(store, meaning_of(LAYOUT, "f"), PAGE, 0, lambda: 0.0)
        terms = self.tell, self.memory, self.tiers, self.holdings, lambda: 0.0, self.shared
        self.writeback = WriteBack(*terms)
        self.kept = self.writeback.take
        self.warmer = Warmer(
            self.filler,
            self,
            BlockKind("f", "test", windows=WINDOWS),
            lower=LowerTiers(self.tiers, self.holdings, self.shared),
        )
        self.pins = PrefixPins(self.source, self.warmer, 24, 16, WINDOWS)
        self._task = asyncio.create_task(self.writeback.run())

    async def blocks(self, address: str, hashes: tuple[bytes, ...]) -> AsyncGenerator[FetchedPage, None]:
        assert self.other is not None
        async for page in self.other.source.fetch("m", hashes, LAYOUT):
            spoilt = page.hash == self.damaged
            yield msgspec.structs.replace(page, data=bytes(PAGE)) if spoilt else page

    async def rest(self) -> None:
        """Waits until idle blocks are in every tier, and the tiers know what the device has."""
        self.holdings.changed(*self.pool.drain_changes())
        self.writeback.idle(self.pool.drain_idle())
        await self.writeback.settled()
        if self.shared is not None:
            await self.shared.settled()

    async def evict(self) -> None:
        self.pool.open([], self.pool.available).close()
        self.holdings.changed(*self.pool.drain_changes())

    def found(self) -> int:
        """Returns how many blocks of the prompt can be continued; every byte is checked."""
        end = deepest(self.pool.blocks.page_of, CHAIN, WINDOWS, 16)
        for name in (*CHAIN[:end], *seen_behind(CHAIN[:end], WINDOWS, 16)):
            assert self.holds([name]) == 1
        assert self.at_baseline()
        return end

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        self.tiers.close()
        if self.shared is not None:
            await self.shared.close()


@asynccontextmanager
async def workers(count: int, store: FolderStore | None = None, pages: int = 64) -> AsyncIterator[Sequence[Worker]]:
    made = [Worker(store=store, pages=pages) for _ in range(count)]
    made[-1].other = made[0]
    try:
        yield made
    finally:
        for worker in made:
            await worker.close()


async def test_a_fetch_brings_what_the_next_token_sees_of_layers_with_a_window() -> None:
    async with workers(2) as (holder, asker):
        holder.compute([*CHAIN, *NAMES])
        report = await asker.warmer.warm(REQUEST, "holder", BLOCKS, 20.0)
        await settle()
        assert (report.blocks, report.bytes) == (BLOCKS + SEEN, (BLOCKS + SEEN) * PAGE)
        assert asker.found() == BLOCKS
        assert holder.at_baseline()


@pytest.mark.parametrize("lacking", [0, SEEN - 1])
async def test_nothing_is_fetched_of_a_prefix_whose_last_window_is_gone(lacking: int) -> None:
    async with workers(2) as (holder, asker):
        names = seen_behind(CHAIN, WINDOWS, 16)
        holder.compute([*CHAIN, *(name for name in names if name != names[lacking])])
        report = await asker.warmer.warm(REQUEST, "holder", BLOCKS, 20.0)
        await settle()
        assert report.blocks == lacking
        assert asker.found() == 0
        assert asker.pool.match(CHAIN) == 0


async def test_a_damaged_page_of_a_window_is_refused_and_the_prefix_is_computed() -> None:
    async with workers(2) as (holder, asker):
        holder.compute([*CHAIN, *NAMES])
        asker.damaged = NAMES[BLOCKS - 1]
        report = await asker.warmer.warm(REQUEST, "holder", BLOCKS, 20.0)
        await settle()
        assert report.failed
        assert asker.found() == 0


@pytest.mark.parametrize("gone", [None, BLOCKS - 1, BLOCKS - 4])
async def test_lower_tiers_bring_a_prefix_back_as_far_as_its_windows_are_there(gone: int | None) -> None:
    async with workers(1) as (worker,):
        worker.compute([*CHAIN, *(name for name in NAMES if gone is None or name != table_hash(CHAIN[gone], 2))])
        await worker.rest()
        await worker.evict()
        assert worker.found() == 0
        await worker.warmer.warm(REQUEST)
        await settle()
        assert worker.found() == (BLOCKS if gone is None else gone)


async def test_a_window_is_lifted_whose_first_pages_a_tier_has_and_whose_last_the_device() -> None:
    async with workers(1) as (worker,):
        seen = seen_behind(CHAIN, WINDOWS, 16)
        worker.compute([*CHAIN, *seen[:4]])
        await worker.rest()
        await worker.evict()
        worker.compute(seen[4:])
        worker.holdings.changed(*worker.pool.drain_changes())  # no tier has these yet
        await worker.warmer.warm(REQUEST)
        await settle()
        assert worker.found() == BLOCKS


async def test_what_a_prefix_needs_stays_while_the_rest_of_it_is_brought_into_a_full_pool() -> None:
    async with workers(1, pages=24) as (worker,):
        for blocks in (CHAIN, NAMES[:BLOCKS], NAMES[BLOCKS:], chain(24)):
            worker.compute(blocks)
            await worker.rest()
        assert worker.found() == 0
        await worker.warmer.warm(REQUEST)
        await settle()
        assert worker.found() == BLOCKS


async def test_workers_share_the_pages_of_windows_through_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("LOOK_S", "FIRST_READ_S"):
        monkeypatch.setattr(shared, limit, 20.0)
    async with workers(2, FolderStore(tmp_path)) as (writer, reader):
        writer.compute([*CHAIN, *NAMES])
        await writer.rest()
        await reader.warmer.warm(REQUEST)
        await settle()
        assert reader.found() == BLOCKS


async def test_a_pinned_prefix_keeps_the_pages_of_its_windows() -> None:
    async with workers(1) as (worker,):
        worker.compute([*CHAIN, *NAMES])
        kept = EngineRequest("r", PROMPT[:-1], len(PROMPT) - 1, Sampling())
        assert await worker.pins.pin("a", kept, 60.0) == 16 * BLOCKS
        await worker.evict()
        assert deepest(worker.pool.blocks.page_of, CHAIN, WINDOWS, 16) == BLOCKS
        with pytest.raises(PinsFull, match=f"{BLOCKS + SEEN} pages are to be pinned; of 24 .* {BLOCKS + SEEN} are"):
            await worker.pins.pin("b", kept, 60.0)
        assert worker.pins.unpin("a")
        await settle()
        assert worker.found() == BLOCKS


async def test_a_prefix_without_the_pages_of_its_windows_is_not_said_to_be_pinned() -> None:
    async with workers(1) as (worker,):
        worker.compute([*CHAIN, *NAMES[:BLOCKS]])
        kept = EngineRequest("r", PROMPT[:-1], len(PROMPT) - 1, Sampling())
        assert await worker.pins.pin("a", kept, 60.0) == 0
        await settle()
        assert worker.at_baseline()


def test_bytes_of_windows_are_counted_in_what_a_fetch_takes() -> None:
    layout = msgspec.structs.replace(LAYOUT, windows=(0, 32, 64))
    assert window_bytes(layout, 1000) == 6 * PAGE
    assert window_bytes(layout, 48) == 5 * PAGE
    assert window_bytes(LAYOUT, 1000) == 0
