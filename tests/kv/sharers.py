"""A worker's cache without a model: real pool and pages, the engine's sharing, the I/O side's source and filler."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Any

from baton.engine.steps.sharing import PageSharing
from baton.kv.exchange.filling import Filler
from baton.kv.exchange.source import BlockSource
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import KvLayout, LayerGroup

PAGE = 512
LAYOUT = KvLayout("uint8", (LayerGroup("full", ("state",), 1, 1, PAGE // 16),), PAGE, fidelity="test")


def chain(count: int, salt: int = 0) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (salt, i)).digest() for i in range(count)]


def content(block: bytes) -> bytes:
    """Returns what the page of a block holds."""
    return (block * (PAGE // len(block) + 1))[:PAGE]


class Sharer:
    """Engine and I/O side, joined by the event loop.

    ``stall_s`` is longer than a busy machine keeps a block waiting; a test of a stall says how long itself.
    """

    def __init__(self, pages: int = 64, stall_s: float = 60.0) -> None:
        self.memory = PageMemory.create(pages, PAGE)
        self.pool = PagePool(pages)
        self.sharing = PageSharing(self.pool)
        self.source = BlockSource(self.tell, self.memory, LAYOUT, "m")
        self.filler = Filler(self.tell, self.memory, time.monotonic, stall_s)
        self.deaf = False
        self.kept: Any = None

    def tell(self, message: Any) -> None:
        if not self.deaf:
            asyncio.get_running_loop().call_soon(self._engine, message)

    def _engine(self, message: Any) -> None:
        answer = getattr(self.sharing, type(message).__name__.lower())(message)
        if isinstance(answer, ch.Pinned):
            self.source.take(answer)
        elif isinstance(answer, ch.Filling):
            self.filler.take(answer)
        elif isinstance(answer, ch.KeepAnswer):
            self.kept(answer)

    def compute(self, hashes: Sequence[bytes]) -> None:
        """Computes blocks as a request would, after which they are cached."""
        with self.pool.open(hashes, len(hashes)) as lease:
            for index in range(lease.held, len(hashes)):
                self.memory.page(lease.pages[index])[:] = content(hashes[index])
                lease.seal(index, hashes[index])

    def holds(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that are findable; their bytes are checked."""
        found = self.pool.match(hashes)
        with self.pool.open(hashes[:found], found) as lease:
            for index, page in enumerate(lease.pages):
                assert bytes(self.memory.page(page)) == content(hashes[index])
        return found

    def at_baseline(self) -> bool:
        self.pool.check()
        counts = self.pool.snapshot_counts()
        return not (counts.leased or counts.quarantined or counts.leases or len(self.sharing))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
