"""Serves cached blocks of this worker to others: pinned by the engine, read page by page, checksummed. Torch-free.

Knows nothing of gRPC, of roles, or of what the blocks are for. Any worker can be a source. A page is read only
between Pinned and Unpin. A fetcher that reads slowly, or stops, holds pages for ``STALL_S`` and ``PINNED_S`` at
most; then its fetch ends early.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from baton.kv.layout.page import require_same
from baton.kv.memory.block_sums import checksum
from baton.kv.memory.host_pages import PageMemory
from baton.protos import channel as ch
from baton.protos.errors import BatonError, ModelNotFound
from baton.protos.nouns import KvLayout

STALL_S = 2.0  # seconds between two blocks, because a fetcher of ours waits as long for one (filling.py)
PINNED_S = 30.0  # seconds that one fetch may hold pages, in total


class FetchedPage(msgspec.Struct, frozen=True):
    """A copy of one cached block, with its block hash."""

    hash: bytes
    checksum: int  # xxh3-64 of data
    data: bytes


class BlockSource:
    """Serves cached KV blocks to other workers.

    ``send`` queues a message to the engine without blocking; ``take`` gets the engine's answers. ``lift(hashes)``
    first brings blocks up from lower tiers.
    """

    def __init__(
        self,
        send: ch.SendToEngine,
        memory: PageMemory,
        layout: KvLayout,
        model_id: str,
        lift: Callable[[tuple[bytes, ...]], Awaitable[int]] | None = None,
    ) -> None:
        self.served_blocks = 0
        self._send, self._memory, self._layout, self._model_id = send, memory, layout, model_id
        self._keys = itertools.count(-2, -1)  # downwards: never a request's key
        self._pins: dict[int, asyncio.Future[ch.Pinned]] = {}
        self._lift = lift
        self._lost: BatonError | None = None

    async def fetch(
        self, model_id: str, hashes: tuple[bytes, ...], layout: KvLayout
    ) -> AsyncGenerator[FetchedPage, None]:
        """Yields blocks for ``hashes``, in order, up to the first that isn't cached here. Raises ModelNotFound,
        LayoutMismatch, and WorkerLost once the engine is gone.
        """
        self._check(model_id, layout)
        if self._lift is not None:
            await self._lift(hashes)
            self._check(model_id, layout)  # the engine may have gone meanwhile: nobody would answer
        key, loop = next(self._keys), asyncio.get_running_loop()
        self._pins[key] = pinned = loop.create_future()
        self._send(ch.Pin(key, hashes))
        try:
            pages, until = (await pinned).pages, loop.time() + PINNED_S
            for block, page in zip(hashes, pages, strict=False):
                data = bytes(self._memory.page(page))
                self.served_blocks += 1
                patience = loop.call_at(min(until, loop.time() + STALL_S), self._unpin, key)
                yield FetchedPage(block, checksum(data), data)
                patience.cancel()
                if key not in self._pins:
                    return
        finally:
            self._unpin(key)

    async def hold(self, hashes: tuple[bytes, ...]) -> tuple[int, int]:
        """Pins the cached leading blocks of ``hashes`` in their pages until ``let_go(key)``; returns the key and
        the number of blocks. Raises WorkerLost.
        """
        if self._lost is not None:
            raise self._lost
        key = next(self._keys)
        self._pins[key] = pinned = asyncio.get_running_loop().create_future()
        self._send(ch.Pin(key, hashes, lasts=True))
        try:
            return key, len((await pinned).pages)
        except BaseException:
            self._unpin(key)
            raise

    def let_go(self, key: int) -> None:
        """Unpins the blocks that ``hold`` pinned under ``key``."""
        self._unpin(key)

    def _unpin(self, key: int) -> None:
        """Lets the engine reuse the pages pinned under ``key``; the caller reads none of them any more."""
        if self._pins.pop(key, None) is not None:
            self._send(ch.Unpin(key))

    def take(self, message: ch.Pinned) -> None:
        """Takes the engine's answer to a pin: the pages of the blocks."""
        pinned = self._pins.get(message.key)
        if pinned is not None and not pinned.done():
            pinned.set_result(message)

    def lost(self, error: BatonError) -> None:
        """Fails every open fetch, because the engine is gone."""
        self._lost = error
        for pinned in self._pins.values():
            if not pinned.done():
                pinned.set_exception(error)

    def _check(self, model_id: str, layout: KvLayout) -> None:
        if self._lost is not None:
            raise self._lost
        if model_id and model_id != self._model_id:
            raise ModelNotFound(f"this worker serves {self._model_id!r}, not {model_id!r}", "model_id")
        require_same(self._layout, layout)
