"""Copies blocks that no request leases any more to the lower tiers, in the background. Torch-free.

Knows nothing of what the blocks are for. The engine never waits for it: under pressure a page may be evicted before
its turn, and is then not copied. At most a share of the time is spent copying, so that the memory bus is free for
decode steps on the same machine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from baton.kv.memory.host_pages import PageMemory
from baton.kv.tiers.holdings import Holdings
from baton.kv.tiers.shared import SharedTier
from baton.kv.tiers.stack import BATCH, Tiers
from baton.protos import channel as ch
from baton.tasks.lasting import count_failure

log = logging.getLogger("baton.kv")

DUTY = 0.25  # largest share of the time that is spent copying
STALL_S = 2.0  # seconds after which a batch is given up, because its pages can't be evicted meanwhile


class WriteBack:
    """Copies idle blocks to the lower tiers while ``run`` is running; ``idle`` and ``take`` handle the engine's
    messages.

    ``send`` queues a message to the engine without blocking.
    """

    def __init__(
        self,
        send: ch.SendToEngine,
        memory: PageMemory,
        tiers: Tiers,
        holdings: Holdings,
        clock: Callable[[], float],
        shared: SharedTier | None = None,
    ) -> None:
        self._shared = shared
        self._send, self._memory, self._tiers, self._holdings = send, memory, tiers, holdings
        self._clock = clock
        self._keys = itertools.count(-2, -1)  # downwards: never a request's key
        self._asked: dict[int, asyncio.Future[ch.KeepAnswer]] = {}
        self._queue: dict[bytes, None] = {}
        self._news, self._calm = asyncio.Event(), asyncio.Event()
        self._calm.set()

    def idle(self, hashes: Sequence[bytes]) -> None:
        """Queues blocks that became idle; the last of ``hashes`` was used most recently."""
        for block in hashes:
            self._queue.pop(block, None)
            self._queue[block] = None
        self._news.set()
        self._calm.clear()

    async def settled(self) -> None:
        """Waits until every queued block is copied, or was evicted."""
        await self._calm.wait()

    async def run(self) -> None:
        """Copies queued blocks until cancelled."""
        while True:
            if not self._queue:
                self._news.clear()
                self._calm.set()
                await self._news.wait()
            began = self._clock()
            try:
                await self._batch()
            except TimeoutError:
                log.warning("a lower tier takes more than %g s for %d blocks: they aren't kept", STALL_S, BATCH)
            except Exception:  # these blocks aren't kept, and nothing else is the worse for it
                log.exception("blocks could not be written back")
                count_failure("write-back")
            await asyncio.sleep((self._clock() - began) * (1 / DUTY - 1))

    def take(self, message: ch.KeepAnswer) -> None:
        """Takes the engine's answer: the pages that may be copied."""
        asked = self._asked.get(message.key)
        if asked is not None and not asked.done():
            asked.set_result(message)

    async def _batch(self) -> None:
        """Copies, or only touches, the oldest queued blocks; their order of use is kept."""
        blocks = list(itertools.islice(self._queue, BATCH))
        for block in blocks:
            del self._queue[block]
        if all(map(self._tiers.everywhere, blocks)) and not self._shareable(blocks):
            async with asyncio.timeout(STALL_S):
                await self._tiers.touch(blocks)
            self._holdings.stored((), self._tiers.drain_gone())
            return
        key = next(self._keys)
        self._asked[key] = asked = asyncio.get_running_loop().create_future()
        self._send(ch.Keep(key, tuple(blocks)))
        try:
            kept = await asked
            pages = [self._memory.page(page) for page in kept.pages]
            failed = await self._store(kept.hashes, pages)
            if self._shared is not None:
                await self._shared.offer(kept.hashes, pages)
            if failed is not None:
                raise failed
        finally:
            del self._asked[key]
            self._send(ch.Unkeep(key))

    async def _store(self, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> Exception | None:
        """Copies blocks to this worker's own tiers; returns the error if that failed, because the caller shares
        them first. Some are stored then all the same, and others were evicted for them.
        """
        try:
            async with asyncio.timeout(STALL_S):
                await self._tiers.store(blocks, pages)
        except Exception as error:
            return error
        finally:
            self._holdings.stored(blocks, self._tiers.drain_gone())
        return None

    def _shareable(self, blocks: Sequence[bytes]) -> bool:
        return self._shared is not None and any(map(self._shared.wants, blocks))
