"""Manages the lower tiers of one worker, host memory and disk. Every block is copied to all of them.

Knows nothing of pools or messages. Each tier has a thread of its own, the only one that touches its slab, so a slow
disk delays neither the event loop nor the host tier; membership is queried without waiting. Pages are only lent to
it (lending.py): a caller that is cancelled gets them back at once. A tier whose thread hangs is skipped until it
responds.

While decode steps run (``duty`` below 1) pages are copied in pieces of about ``PIECE_BYTES``, one at a time over
all tiers and directions. After each piece there is a pause that keeps the copies' share of the time at ``duty``,
because they compete for the memory bus. A piece's time is its thread's CPU time: waiting for a core or a disk
doesn't use the bus.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from baton.kv.tiers.lending import PageAccess
from baton.kv.tiers.slab import Slab, Touching

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BATCH = 16  # blocks copied at once
PIECE_BYTES = 1 << 20  # bytes of a piece, which take a tenth of a millisecond and delay no step for long
# Share of the time, because a CPU's decode step is bound by the same memory bus (docs/prefix-cache.md).
BESIDE_DECODE = 0.04
LEAST_PAUSE_S = 0.002  # seconds; shorter pauses add up first, because event loops' timers are a millisecond coarse
MOST_PAUSE_S = 0.1  # seconds of the longest pause after one piece
HUNG_S = 0.5  # seconds after which a thread that hasn't ended cancelled work counts as hung


class Tier:
    """Runs work on one slab in the thread that owns it. ``name`` is for metrics."""

    def __init__(self, name: str, slab: Slab) -> None:
        self.name, self.slab = name, slab
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tier-{name}")
        self._given_up: tuple[Callable[[], bool], float] | None = None

    @property
    def hung(self) -> bool:
        """Returns whether the thread is still busy with work that was cancelled more than HUNG_S seconds ago."""
        if self._given_up is None or self._given_up[0]():
            return False
        return asyncio.get_running_loop().time() - self._given_up[1] > HUNG_S

    async def run(self, work: Callable[[Slab, Touching, *Ts], T], *args: *Ts) -> T:
        """Runs ``work`` on the tier's thread and returns its result.

        ``work`` gets the slab, a function that returns the context in which pages may be accessed, and ``args``. If
        the caller is cancelled, no page is accessed after this has ended, though the thread may still wait for its
        device.
        """
        access, loop = PageAccess(), asyncio.get_running_loop()
        job = loop.run_in_executor(self._thread, work, self.slab, access.touching, *args)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(_seen)
            if not self.hung:
                self._given_up = job.done, loop.time()
            await access.revoke()
            raise

    def close(self) -> None:
        """Waits for the work in progress, unless the thread hangs."""
        self._thread.shutdown(wait=not self.hung, cancel_futures=True)


class Tiers:
    """Copies blocks to and from every tier, the fastest first. ``duty`` is the share of the time that may be spent
    copying.

    ``clock`` returns CPU seconds; it is called on the copying thread, before and after.
    """

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float] = time.thread_time) -> None:
        self.tiers = tuple(tiers)
        self.duty = 1.0
        self._clock = clock
        self._turn = asyncio.Lock()
        self._owed_s = 0.0

    def __contains__(self, block: bytes) -> bool:
        return any(block in tier.slab for tier in self.tiers)

    def everywhere(self, block: bytes) -> bool:
        """Returns whether every tier has ``block``."""
        return all(block in tier.slab for tier in self.tiers)

    def hashes(self) -> set[bytes]:
        """Returns the hashes of the blocks that any tier has."""
        return {block for tier in self.tiers for block in tier.slab.hashes()}

    async def store(self, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        """Copies pages to all tiers; blocks already there are touched."""
        if self.duty < 1.0:
            await self._store_gently(blocks, pages)
        else:
            await self._everywhere(_put, blocks, pages)

    def drain_gone(self) -> set[bytes]:
        """Returns the blocks that no tier has any more, of those that one evicted or lost since the last call."""
        return {block for tier in self.tiers for block in tier.slab.drain_gone() if block not in self}

    async def touch(self, blocks: Sequence[bytes]) -> None:
        """Makes ``blocks`` the most recently used ones of every tier, so that they are evicted last."""
        await self._everywhere(_touch, blocks)

    async def load(self, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> AsyncGenerator[int, None]:
        """Copies leading blocks to ``pages``, verified; yields how many more were copied each time, and ends at the
        first that no tier has.
        """
        at = 0
        while at < len(blocks):
            tier = next((tier for tier in self.tiers if blocks[at] in tier.slab and not tier.hung), None)
            if tier is None:
                return
            end, most = at + 1, at + self._batch(pages)
            while end < min(len(blocks), most) and blocks[end] in tier.slab:
                end += 1
            here = blocks[at:end], pages[at:end]
            loaded = await (self._gently(tier, _load, *here) if self.duty < 1.0 else tier.run(_load, *here))
            at += loaded
            if loaded:  # else the tier has just dropped a damaged block: a lower one may have it whole
                yield loaded

    def close(self) -> None:
        """Waits for every tier's thread, except those that hang."""
        for tier in self.tiers:
            tier.close()

    def _batch(self, pages: Sequence[memoryview]) -> int:
        """Returns how many blocks to copy at once."""
        return BATCH if self.duty >= 1.0 else max(1, min(BATCH, PIECE_BYTES // len(pages[0])))

    async def _store_gently(self, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        for at in range(0, len(blocks), step := self._batch(pages) if pages else BATCH):
            for tier in self.tiers:
                if tier.hung:
                    continue
                await self._gently(tier, _put, blocks[at : at + step], pages[at : at + step])

    async def _everywhere(self, work: Callable[[Slab, Touching, *Ts], T], *args: *Ts) -> list[T]:
        """Runs ``work`` concurrently on all tiers that don't hang; when it ends, it has ended on each of them."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(tier.run(work, *args)) for tier in self.tiers if not tier.hung]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _gently(self, tier: Tier, work: Callable[[Slab, Touching, *Ts], T], *args: *Ts) -> T:
        """Copies one piece, with no other at the same time, and pauses as ``duty`` requires."""
        async with self._turn:
            done, took = await tier.run(_timed(self._clock, work), *args)
            self._owed_s += min(took * (1 / self.duty - 1), MOST_PAUSE_S)
            if self._owed_s >= LEAST_PAUSE_S:
                pause, self._owed_s = self._owed_s, 0.0
                await asyncio.sleep(pause)
        return done


def _seen(job: asyncio.Future[T]) -> None:
    """Retrieves the exception of a job that nobody waits for any more."""
    if not job.cancelled():
        job.exception()


def _timed(
    clock: Callable[[], float], work: Callable[[Slab, Touching, *Ts], T]
) -> Callable[[Slab, Touching, *Ts], tuple[T, float]]:
    def timed(slab: Slab, touching: Touching, *args: *Ts) -> tuple[T, float]:
        began = clock()
        return work(slab, touching, *args), clock() - began

    return timed


def _put(slab: Slab, touching: Touching, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> None:
    for block, page in zip(blocks, pages, strict=True):
        slab.put(block, page, touching)


def _touch(slab: Slab, touching: Touching, blocks: Sequence[bytes]) -> None:
    for block in blocks:
        slab.touch(block)


def _load(slab: Slab, touching: Touching, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> int:
    """Returns how many leading blocks were copied whole."""
    for count, (block, page) in enumerate(zip(blocks, pages, strict=True)):
        if not slab.load(block, page, touching):
            return count
    return len(blocks)
