"""Supplies pages without a lease: free ones, and cached ones in an order of eviction. Torch-free.

Knows nothing of leases or of I/O in flight. A page that holds a findable block is cached, any other is free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from baton.kv.pages.blocks import BlockIndex


class EvictionOrder(Protocol):
    """Orders cached pages by which is evicted first; implemented by ``lru.PageOrder`` and ``worth.WorthOrder``."""

    def __len__(self) -> int:
        """Returns the number of cached pages."""

    def __contains__(self, page: int) -> bool:
        """Returns whether ``page`` is cached."""

    def __iter__(self) -> Iterator[int]:
        """Yields the cached pages."""

    def add(self, pages: Sequence[int], hinted: Collection[int] = ()) -> None:
        """Adds pages that lost their last lease, a chain's tail first; a client will use ``hinted`` ones again."""

    def remove(self, pages: Sequence[int]) -> None:
        """Removes pages because they are leased again."""

    def discard(self, pages: Sequence[int]) -> None:
        """Removes pages whose blocks are lost, which counts as no use of them."""

    def take(self, count: int, kept: Collection[int] = ()) -> list[int]:
        """Removes and returns the ``count`` pages to evict, none of ``kept``; there must be that many."""

    def handed_out(self, pages: int) -> None:
        """Counts ``pages`` pages that leases got."""

    def placed(self, pages: Sequence[int], first: int) -> None:
        """Sets the positions of ``pages`` in their chain: ``first`` and the following."""

    def priced(self, pair_cost: float) -> None:
        """Sets the cost that each preceding block adds to computing a block, in units of the cost of a chain's
        first block.
        """


class PageSupply:
    """Supplies pages to leases: free ones first, then cached ones in the order of ``cached``, whose blocks it
    removes from the index.

    ``kept`` counts, by page, the copies in progress that forbid its eviction. ``idle`` collects the blocks that
    joined the cache, in that order; None if these aren't watched. ``freed``, unless it is None, hears of pages that
    become free.
    """

    def __init__(self, pages: int, blocks: BlockIndex, cached: EvictionOrder) -> None:
        self.free = list(range(pages - 1, -1, -1))
        self.cached = cached
        self.kept: dict[int, int] = {}
        self.idle: dict[bytes, None] | None = None
        self.freed: Callable[[Sequence[int]], None] | None = None
        self._blocks = blocks

    @property
    def available(self) -> int:
        """Returns how many pages ``take`` could return now: free ones, and cached ones that are not kept."""
        kept = sum(page in self.cached for page in self.kept) if self.kept else 0
        return len(self.free) + len(self.cached) - kept

    def evictable(self, pages: Sequence[int]) -> int:
        """Returns how many of ``pages`` are cached and not protected by ``keep``."""
        return sum(page in self.cached and page not in self.kept for page in pages)

    def take(self, count: int) -> list[int]:
        """Removes and returns ``count`` pages; that many must be available."""
        free = self.free
        self.cached.handed_out(count)
        if count == 1 and free:  # a decode step's usual need
            return [free.pop()]
        left = max(0, len(free) - count)
        pages = free[left:][::-1]
        del free[left:]
        if len(pages) < count:
            pages += self._evict(count - len(pages))
        return pages

    def give_back(self, pages: Sequence[int], hinted: Collection[int] = ()) -> None:
        """Adds ``pages``, which have no lease any more, the most recently used last; those with a findable block
        become cached.
        """
        block_of, free, idle, cached = self._blocks.block_of, self.free, self.idle, []
        had = len(free)
        for page in pages:
            block = block_of[page]
            if block is None:
                free.append(page)
                continue
            cached.append(page)
            if idle is not None:
                idle.pop(block, None)
                idle[block] = None
        if self.freed is not None and len(free) > had:
            self.freed(free[had:])
        if cached:
            self.cached.add(cached, hinted)

    def keep(self, page: int) -> None:
        """Forbids the eviction of ``page`` until a matching ``unkeep``; its place in the eviction order stays."""
        self.kept[page] = self.kept.get(page, 0) + 1

    def unkeep(self, page: int) -> None:
        """Reverts one ``keep`` of ``page``, which may be evicted once all are reverted."""
        self.kept[page] -= 1
        if self.kept[page] == 0:
            del self.kept[page]

    def drain_idle(self) -> tuple[bytes, ...]:
        """Returns the hashes of the blocks that joined the cache since the last call; none if ``idle`` is None."""
        blocks = tuple(self.idle or ())
        if blocks:
            self.idle = {}
        return blocks

    def _evict(self, count: int) -> list[int]:
        pages = self.cached.take(count, self.kept)
        self._blocks.forget(pages)
        return pages
