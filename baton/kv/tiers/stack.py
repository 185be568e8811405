"""The lower tiers of one worker, fastest first: host memory, then disk. Everything is copied to all of them.

Knows nothing of pools or messages. Each tier has a thread of its own, the only one that touches its slab, so a slow
disk delays neither the event loop nor the host tier; membership is asked without waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from baton.kv.tiers.slab import Slab

T = TypeVar("T")

BATCH = 16
BESIDE_DECODE = 0.1  # of the time: a CPU decode step is bound by the same memory bus
MOST_PAUSE_S = 0.1  # a batch that took long waited for a core, which keeps nobody from the bus


class Tier:
    """A slab, the thread that owns it, and a name for metrics."""

    def __init__(self, name: str, slab: Slab) -> None:
        self.name, self.slab = name, slab
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tier-{name}")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """``work`` on the tier's thread. A cancelled caller waits: it may be writing to the caller's pages."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work, self.slab, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise

    def close(self) -> None:
        """Wait for what is running."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class Tiers:
    """Every tier, fastest first. ``duty`` is the share of the time that ``load`` may copy."""

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float] = time.monotonic) -> None:
        self.tiers = tuple(tiers)
        self.duty = 1.0
        self._clock = clock

    def __contains__(self, block: bytes) -> bool:
        return any(block in tier.slab for tier in self.tiers)

    def everywhere(self, block: bytes) -> bool:
        """Whether no tier lacks it."""
        return all(block in tier.slab for tier in self.tiers)

    def hashes(self) -> set[bytes]:
        """What any tier holds."""
        return {block for tier in self.tiers for block in tier.slab.hashes()}

    async def store(self, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> set[bytes]:
        """Copy pages down, touching those that are there; the blocks that no tier has any more because of it."""
        pushed = await asyncio.gather(*(tier.run(_put, blocks, pages) for tier in self.tiers))
        return {block for gone in pushed for block in gone if block not in self}

    async def touch(self, blocks: Sequence[bytes]) -> None:
        """They were used now."""
        await asyncio.gather(*(tier.run(_touch, blocks) for tier in self.tiers))

    async def load(self, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> AsyncGenerator[int, None]:
        """Copy leading blocks up and verify them: how many more are in, again and again, until one isn't here."""
        at = 0
        while at < len(blocks):
            tier = next((tier for tier in self.tiers if blocks[at] in tier.slab), None)
            if tier is None:
                return
            end = at + 1
            while end < min(len(blocks), at + BATCH) and blocks[end] in tier.slab:
                end += 1
            began = self._clock()
            loaded = await tier.run(_load, blocks[at:end], pages[at:end])
            at, took = at + loaded, self._clock() - began
            if loaded:  # else the tier has just dropped a damaged block: a lower one may have it whole
                yield loaded
            if self.duty < 1.0:
                await asyncio.sleep(min(took * (1 / self.duty - 1), MOST_PAUSE_S))

    def close(self) -> None:
        """Wait for every thread."""
        for tier in self.tiers:
            tier.close()


def _put(slab: Slab, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> list[bytes]:
    gone = [slab.put(block, page) for block, page in zip(blocks, pages, strict=True)]
    return [block for block in gone if block is not None]


def _touch(slab: Slab, blocks: Sequence[bytes]) -> None:
    for block in blocks:
        slab.touch(block)


def _load(slab: Slab, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> int:
    """Leading blocks that came whole."""
    for count, (block, page) in enumerate(zip(blocks, pages, strict=True)):
        if not slab.load(block, page):
            return count
    return len(blocks)
