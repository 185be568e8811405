"""A worker's pages over a store that others have as well: shares blocks and finds them, checking each byte."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from baton.kv.exchange.warming import BlockKind, LowerTiers, Warmer
from baton.kv.tiers.blobs import meaning_of
from baton.kv.tiers.holdings import Holdings
from baton.kv.tiers.shared import SharedTier
from baton.kv.tiers.stack import Tiers
from baton.kv.tiers.writeback import WriteBack
from tests.kv.sharers import LAYOUT, PAGE, Sharer, chain, content, settle

CHAIN = chain(20)
MEANING = meaning_of(LAYOUT, "f")


class Worker(Sharer):
    """A device of ``pages`` pages over a store that others have as well."""

    def __init__(self, store: object, pages: int = 24, most_bytes: int = 0) -> None:
        super().__init__(pages)
        self.now = 0.0
        self.pool.watch_idle()
        tiers = Tiers([])
        holdings = Holdings(tiers)
        self.shared = SharedTier(store, MEANING, PAGE, most_bytes, lambda: self.now)
        self.writeback = WriteBack(self.tell, self.memory, tiers, holdings, lambda: 0.0, self.shared)
        self.kept = self.writeback.take
        lower = LowerTiers(tiers, holdings, self.shared)
        self.warmer = Warmer(self.filler, None, BlockKind("f", "test"), lower=lower)
        self._task = asyncio.create_task(self.writeback.run())

    async def share(self, hashes: Sequence[bytes]) -> None:
        """Ends a request: its blocks are written to the store, if the store takes them."""
        self.compute(hashes)
        self.writeback.idle(self.pool.drain_idle())
        await self.writeback.settled()
        await self.shared.settled()

    async def find(self, hashes: Sequence[bytes]) -> int:
        """Begins a request; returns how many leading blocks are on the device then, after checking each byte."""
        await self.warmer._take_shared(hashes, 0)
        await settle()
        held = self.pool.match(hashes)
        for block in hashes[:held]:
            assert bytes(self.memory.page(self.pool.blocks.page_of[block])) == content(block)
        self.pool.check()
        assert not self.pool.open_leases
        return held

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self.shared.close()
