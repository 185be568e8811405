"""Fills pages of this worker's engine with blocks from elsewhere, verified one by one, and makes them findable.
Torch-free.

Knows nothing of where the bytes come from (another worker, a tier): a ``Source`` yields leading blocks in order.
If a fill fails, the blocks verified until then are kept and the rest is computed: a fill raises no error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial

import msgspec

from baton.kv.exchange.source import FetchedPage
from baton.kv.memory.block_sums import checksum
from baton.kv.memory.host_pages import PageMemory
from baton.protos import channel as ch
from baton.protos.errors import BatonError, CorruptFrame, ForeignBlock

log = logging.getLogger("baton.kv")

STALL_S = 2.0  # seconds without a block after which a fill is given up

Source = Callable[[tuple[bytes, ...]], AsyncGenerator[FetchedPage, None]]
"""Yields blocks for the hashes, in their order, and ends at the first that it doesn't have."""

Bring = Callable[[tuple[bytes, ...], Sequence[memoryview]], AsyncGenerator[int, None]]
"""Writes blocks for the hashes to the pages, in order, verified; yields how many more were written each time."""

Then = Callable[[float | None], Awaitable["FillReport"]]
"""Is a fill that follows another, told the seconds that are left for it (None: no limit)."""


class FillReport(msgspec.Struct, frozen=True):
    """Reports a fill: ``blocks`` new blocks of ``bytes`` bytes in all came in ``seconds``.

    ``failed`` says that the source broke, or took too long.
    """

    held: int  # blocks that were cached here before
    blocks: int
    bytes: int
    seconds: float
    failed: bool = False

    def joined(self, later: FillReport) -> FillReport:
        """Returns the report of this fill and a later one."""
        return FillReport(
            self.held + later.held,
            self.blocks + later.blocks,
            self.bytes + later.bytes,
            self.seconds + later.seconds,
            self.failed or later.failed,
        )


NOTHING = FillReport(0, 0, 0, 0.0)


class Filler:
    """Runs the fills of this worker, each at most ``stall_s`` seconds without a block.

    ``send`` queues a message to the engine without blocking; ``take`` gets the engine's answers. ``failures``
    counts the fills that failed.
    """

    def __init__(
        self,
        send: ch.SendToEngine,
        memory: PageMemory,
        clock: Callable[[], float],
        stall_s: float = STALL_S,
    ) -> None:
        self.failures = 0
        self._send, self._memory, self._clock, self._stall_s = send, memory, clock, stall_s
        self._keys = itertools.count(-2, -1)  # downwards: never a request's key
        self._asked: dict[int, asyncio.Future[ch.Filling]] = {}
        self._flying: dict[bytes, asyncio.Event] = {}  # by the last block's hash
        self._lost = False

    async def fill(self, hashes: Sequence[bytes], source: Source, limit_s: float | None = None) -> FillReport:
        """Caches leading blocks of ``hashes`` from ``source`` in pages of this worker; returns how many came, also
        if it failed.

        It ends at the first block that is missing or wrong, after ``limit_s`` seconds (None: no limit) and after
        ``stall_s`` seconds without a block.
        """
        return await self.load(hashes, self.verified(source), limit_s)

    def verified(self, source: Source) -> Bring:
        """Returns what writes blocks from ``source`` to pages, each after it was verified."""
        return partial(self._verified, source)

    async def load(
        self, hashes: Sequence[bytes], bring: Bring, limit_s: float | None = None, then: Then | None = None
    ) -> FillReport:
        """Caches leading blocks of ``hashes`` by ``bring``, which writes verified blocks to pages itself, and
        returns a report.

        Of several concurrent callers that want the same blocks, one brings them; the others wait and then find
        them. The time limits are those of ``fill``. If all came, ``then`` is another fill that happens before the
        pages of this one may be evicted, in the time that is left; the report is of both.
        """
        if not hashes or not await self._our_turn(hashes[-1], limit_s):
            return NOTHING
        self._flying[hashes[-1]] = landed = asyncio.Event()
        try:
            return await self._load(hashes, bring, limit_s, then)
        finally:
            del self._flying[hashes[-1]]
            landed.set()

    async def _our_turn(self, last: bytes, limit_s: float | None) -> bool:
        """Waits for another caller that brings the same blocks; returns False if it took too long, or the engine is
        gone.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while (landed := self._flying.get(last)) is not None:
                    await landed.wait()
        return last not in self._flying and not self._lost

    async def _load(
        self, hashes: Sequence[bytes], bring: Bring, limit_s: float | None, then: Then | None
    ) -> FillReport:
        began, key = self._clock(), next(self._keys)
        self._asked[key] = asked = asyncio.get_running_loop().create_future()
        self._send(ch.Fill(key, tuple(hashes)))
        done, held, failed, later = 0, 0, False, NOTHING
        try:
            filling = await asked
            done = held = filling.held
            async with asyncio.timeout(limit_s) as limit:
                if len(filling.pages) > held:
                    pages = [self._memory.page(page) for page in filling.pages[held:]]
                    async with aclosing(bring(tuple(hashes[held:]), pages)) as progress:
                        while (more := await self._next(progress)) is not None:
                            done += more
            if then is not None and done == len(hashes):
                later = await then(_left(limit.when()))  # it keeps to its limit itself, and reports what it did
        except (BatonError, OSError, TimeoutError) as error:
            self.failures, failed = self.failures + 1, True
            log.info("a fill ended after %d of %d blocks, the rest is computed: %s", done, len(hashes), error)
        finally:
            del self._asked[key]
            self._send(ch.Filled(key, done))  # also when cancelled: no write follows it
        size = (done - held) * self._memory.page_bytes
        report = FillReport(held, done - held, size, self._clock() - began - later.seconds, failed)
        return report if later is NOTHING else report.joined(later)

    async def _next(self, progress: AsyncGenerator[int, None]) -> int | None:
        """Returns the next progress within the time limit, not by ``asyncio.wait_for``, which until Python 3.12
        swallows a cancellation that meets the result.
        """
        async with asyncio.timeout(self._stall_s):
            return await anext(progress, None)

    def take(self, message: ch.Filling) -> None:
        """Takes the engine's answer to a fill: the pages to fill, or none."""
        asked = self._asked.get(message.key)
        if asked is not None and not asked.done():
            asked.set_result(message)

    def lost(self, error: BatonError) -> None:
        """Fails every open fill, because the engine is gone."""
        self._lost = True
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)

    async def _verified(
        self, source: Source, hashes: tuple[bytes, ...], pages: Sequence[memoryview]
    ) -> AsyncGenerator[int, None]:
        """Write what the source gives, block by block, once it is known to be what was asked for."""
        async with aclosing(source(hashes)) as blocks:
            for expected, page in zip(hashes, pages, strict=True):
                block = await anext(blocks, None)
                if block is None:
                    return
                _require_whole(block, expected, len(page))
                page[:] = block.data
                yield 1


def _left(until: float | None) -> float | None:
    """Returns the seconds until the loop's time ``until``; None for None."""
    return None if until is None else max(0.0, until - asyncio.get_running_loop().time())


def _require_whole(block: FetchedPage, expected: bytes, page_bytes: int) -> None:
    if block.hash != expected:
        raise ForeignBlock("the source gave a block of other tokens", "hash")
    if len(block.data) != page_bytes:
        raise CorruptFrame(f"a page has {page_bytes} bytes, the block {len(block.data)}", "data")
    if checksum(block.data) != block.checksum:
        raise CorruptFrame("the block's checksum is wrong: it was damaged on the way", "checksum")
