"""Shares blocks with other workers through a store that all reach, behind the worker's own tiers. Torch-free.

Knows nothing of pools, or of the kind of store. Nothing waits for the store: blocks are copied and queued, up to
``QUEUE_BYTES``; those that don't fit aren't shared. A store that is slow, full or gone is not used for a while
(``Patience``), and blocks from it are verified: at worst there is a miss.

Caches hold prefixes, so ``leading`` finds how much of a chain is there by a binary search over its length.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from baton.kv.tiers.blobs import BlobStore, blob_bytes, is_name, name_of, packed, unpacked
from baton.tasks.lasting import lasting
from baton.tasks.outlasting import outlasted

T = TypeVar("T")
log = logging.getLogger("baton.kv")

QUEUE_BYTES = 256 << 20  # bytes of copies that wait for the store
THREADS = 4  # concurrent calls of the store
MOST_HUNG = 2 * THREADS  # abandoned calls in progress, beyond which the store isn't used
LOOK_S, FIRST_READ_S, WRITE_S = 0.25, 0.5, 10.0  # seconds after which a search, a first read, a write is too slow
READ_S = 0.01  # further seconds for each block of a chain, because computing one takes hardly longer
FIRST_REST_S, MOST_REST_S = 1.0, 60.0  # seconds that a failed store isn't used; doubled each time
KNOWN = 65_536  # blocks remembered to be in the store, so that they aren't written again
TRIM_EVERY = 256  # blocks written between two checks of how full the store is
TRIM_TO = 0.9  # share of the limit to which the store is trimmed


class Patience:
    """Decides when a store that failed may be used again. ``clock`` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._until, self._rest_s = clock, float("-inf"), 0.0

    @property
    def resting(self) -> bool:
        """Returns whether the store should not be used now."""
        return self._clock() < self._until

    def answered(self) -> None:
        """Records that a call of the store succeeded."""
        self._rest_s = 0.0

    def failed(self) -> None:
        """Records a failed call of the store, which is then not used for a time that doubles with each further
        failure.
        """
        self._rest_s = min(MOST_REST_S, 2 * self._rest_s or FIRST_REST_S)
        self._until = self._clock() + self._rest_s


class PageCoder(NamedTuple):
    """Codes a page as ``unit`` bytes for the store (``code``) and decodes it (``restore``). Both are called on
    threads.
    """

    unit: int
    code: Callable[[bytes], bytes]
    restore: Callable[[memoryview], bytes]

    @classmethod
    def plain(cls, page_bytes: int) -> PageCoder:
        """Returns a coder that stores pages of ``page_bytes`` bytes unchanged."""
        return cls(page_bytes, bytes, bytes)


class SharedTier:
    """Stores blocks in ``store`` and loads them from there; all workers together store ``most_bytes`` at most (0:
    no limit).

    Pages, of ``page_bytes`` bytes, are coded by ``coder``, by default not at all. ``failed`` counts failed calls of
    the store, ``dropped`` blocks that weren't stored because the queue was full or the store failed. Its length is
    the number of blocks that this worker knows to be in the store.
    """

    def __init__(
        self,
        store: BlobStore,
        meaning: bytes,
        page_bytes: int,
        most_bytes: int,
        clock: Callable[[], float],
        coder: PageCoder | None = None,
    ) -> None:
        self._coder = coder or PageCoder.plain(page_bytes)
        self.stored = self.loaded = self.evicted = self.damaged = self.failed = self.dropped = 0
        self._store, self._meaning = store, meaning
        self._page_bytes, self._most_bytes = page_bytes, most_bytes
        self._patience = Patience(clock)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tier-shared")
        self._hung = 0  # calls that haven't ended, and that nobody waits for
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._queue: OrderedDict[bytes, bytes] = OrderedDict()
        self._news, self._calm = asyncio.Event(), asyncio.Event()
        self._calm.set()
        self._task = lasting(self._write, "shared tier")

    def wants(self, block: bytes) -> bool:
        """Returns whether ``block`` should be offered: it isn't known to be in the store or queued, and the store
        is in use.
        """
        return block not in self._known and block not in self._queue and not self._patience.resting

    async def offer(self, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        """Copies the pages of wanted blocks, as many as the queue has room for, and queues them for the store.

        Even if cancelled, it reads no page after it has ended.
        """
        wanted = [(block, page) for block, page in zip(blocks, pages, strict=True) if self.wants(block)]
        room = max(1, QUEUE_BYTES // self._page_bytes) - len(self._queue)
        self.dropped += max(0, len(wanted) - room)
        taken = wanted[: max(0, room)]
        copy = asyncio.get_running_loop().run_in_executor(None, _copied, [page for _, page in taken])
        (copies,) = await outlasted(copy)
        self._queue.update(zip((block for block, _ in taken), copies, strict=True))
        if self._queue:
            self._calm.clear()
            self._news.set()

    async def settled(self) -> None:
        """Waits until every queued block is written, or given up."""
        await self._calm.wait()

    async def leading(self, hashes: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a chain the store probably has, by a binary search; 0 if it fails or
        isn't in use.
        """
        try:
            async with asyncio.timeout(LOOK_S):
                return await self._search(hashes)
        except TimeoutError as error:
            self._failed(error)
            return 0

    async def _search(self, hashes: Sequence[bytes]) -> int:
        low, high = 0, len(hashes)
        if not hashes or not await self._has(hashes[0]):
            return 0
        while low + 1 < high:  # the first ``low + 1`` are there
            middle = (low + high) // 2
            if await self._has(hashes[middle]):
                low = middle
            else:
                high = middle
        return low + 1

    async def load(self, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> AsyncGenerator[int, None]:
        """Writes verified blocks to ``pages``, in order, and yields 1 for each; ends at the first that is missing
        or late.
        """
        tasks = [self._begin(block) for block in blocks[:THREADS]]
        until = asyncio.get_running_loop().time() + FIRST_READ_S + READ_S * len(blocks)
        try:
            for at, (block, page) in enumerate(zip(blocks, pages, strict=True)):
                if at + THREADS < len(blocks):
                    tasks.append(self._begin(blocks[at + THREADS]))
                found = await self._within(tasks[at], until)
                if found is None:
                    self._known.pop(block, None)
                    return
                page[:] = found
                self._note(block)
                self.loaded += 1
                yield 1
        finally:
            for task in tasks:
                task.cancel()

    def _begin(self, block: bytes) -> asyncio.Task[bytes | None]:
        return asyncio.create_task(self._ask(self._read, FIRST_READ_S, block))

    async def _within(self, task: asyncio.Task[bytes | None], until: float) -> bytes | None:
        try:
            async with asyncio.timeout_at(until):
                return await task
        except TimeoutError as error:
            self._failed(error)
            return None

    async def close(self) -> None:
        """Stops writing; queued blocks are dropped, and hung threads stay until the process ends."""
        self._task.cancel()
        await asyncio.wait({self._task})
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- with the store --------------------------------------------------------------------------------

    async def _has(self, block: bytes) -> bool:
        if block in self._known:
            return True
        return bool(await self._ask(self._store.has, LOOK_S, name_of(self._meaning, block)))

    async def _ask(self, work: Callable[..., T], limit_s: float, *args: object) -> T | None:
        """Returns the store's result, if it comes within ``limit_s`` seconds; None if it fails or isn't in use."""
        if self._patience.resting or self._hung >= MOST_HUNG:
            return None
        job = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        try:
            async with asyncio.timeout(limit_s):
                found = await asyncio.shield(job)
        except Exception as error:  # whatever a store's client raises: a hit less, and nothing else ends
            self._failed(error)
            return None
        finally:
            if not job.done():
                self._hung += 1
                job.add_done_callback(self._came_back)
        self._patience.answered()
        return found

    def _came_back(self, job: asyncio.Future[T]) -> None:
        self._hung -= 1
        if not job.cancelled():
            job.exception()  # whoever asked has gone, or was told

    def _failed(self, error: Exception) -> None:
        """Counts a failure and logs the 1st, 2nd, 4th, 8th …, because a store that is gone fails on every call."""
        self.failed += 1
        self._patience.failed()
        if self.failed & (self.failed - 1) == 0:
            told = str(error) or "it took too long"
            unforeseen = None if isinstance(error, OSError) else error
            log.warning("the shared tier fails (%d times so far): %s", self.failed, told, exc_info=unforeseen)

    def _read(self, block: bytes) -> bytes | None:
        """Returns the page of a block; removes a blob that is invalid. Runs on a thread."""
        name = name_of(self._meaning, block)
        blob = self._store.get(name, blob_bytes(self._coder.unit) + 1)
        if blob is None:
            return None
        page = unpacked(blob, self._meaning, block, self._coder.unit)
        if page is None:
            self.damaged += 1
            self._store.remove(name)
            return None
        return self._coder.restore(page)

    async def _write(self) -> None:
        """Writes queued blocks, oldest first, and from time to time removes the least recently used ones from the
        store.
        """
        while True:
            if not self._queue:
                self._calm.set()
                self._news.clear()
                await self._news.wait()
            block, page = self._queue.popitem(last=False)
            done = await self._ask(self._put, WRITE_S, block, page)
            if done is None:
                self.dropped += 1
                continue
            self._note(block)
            self.stored += 1
            if self._most_bytes and self.stored % TRIM_EVERY == 1:
                self.evicted += await self._ask(self._trim, MOST_REST_S) or 0

    def _put(self, block: bytes, page: bytes) -> bool:
        name = name_of(self._meaning, block)
        if not self._store.has(name):
            self._store.put(name, packed(self._meaning, block, self._coder.code(page)))
        return True

    def _trim(self) -> int:
        """Removes the least recently used blobs, of all workers, until the limit holds; returns how many. Runs on a
        thread.
        """
        blobs = (entry for entry in self._store.entries() if is_name(entry.name))
        found = sorted(blobs, key=lambda entry: entry.used_at)
        size, gone = sum(entry.size for entry in found), 0
        if size <= self._most_bytes:
            return 0
        for entry in found:
            if size <= TRIM_TO * self._most_bytes:
                break
            self._store.remove(entry.name)
            size, gone = size - entry.size, gone + 1
        return gone

    def __len__(self) -> int:
        return len(self._known)

    def _note(self, block: bytes) -> None:
        self._known[block] = None
        self._known.move_to_end(block)
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)


def _copied(pages: Sequence[memoryview]) -> list[bytes]:
    return [bytes(page) for page in pages]
