"""Supplies pages that no lease has: free ones, and cached ones in the order of their last use. Torch-free.

Knows nothing of leases or of I/O in flight. A page that holds a findable block is cached, any other is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from baton.kv.pages.blocks import BlockIndex
from baton.kv.pages.lru import PageOrder


class PageSupply:
    """Gives out pages, free ones first, then the least recently used cached ones, whose blocks it forgets.

    ``kept`` counts, by page, the copies in progress that forbid its eviction. ``idle`` collects the blocks that
    joined the cache, in that order, and is None where nobody asks.
    """

    def __init__(self, pages: int, blocks: BlockIndex) -> None:
        self.free = list(range(pages - 1, -1, -1))
        self.cached = PageOrder(pages)
        self.kept: dict[int, int] = {}
        self.idle: dict[bytes, None] | None = None
        self._blocks = blocks

    @property
    def available(self) -> int:
        """Returns the pages that ``take`` could give now: free ones, and cached ones that are not kept."""
        kept = sum(page in self.cached for page in self.kept) if self.kept else 0
        return len(self.free) + len(self.cached) - kept

    def evictable(self, pages: Sequence[int]) -> int:
        """Returns how many of ``pages`` are cached and not kept."""
        return sum(page in self.cached and page not in self.kept for page in pages)

    def take(self, count: int) -> list[int]:
        """Removes and returns ``count`` pages; as many must be available."""
        free = self.free
        if count == 1 and free:  # a decode step's usual need
            return [free.pop()]
        left = max(0, len(free) - count)
        pages = free[left:][::-1]
        del free[left:]
        if len(pages) < count:
            pages += self._evict(count - len(pages))
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Adds ``pages`` that no lease has any more, the most recently used last."""
        block_of, free, idle, cached = self._blocks.block_of, self.free, self.idle, []
        for page in pages:
            block = block_of[page]
            if block is None:
                free.append(page)
                continue
            cached.append(page)
            if idle is not None:
                idle.pop(block, None)
                idle[block] = None
        if cached:
            self.cached.add(cached)

    def keep(self, page: int) -> None:
        """Forbids the eviction of ``page`` until a matching ``unkeep``; its place in the order of use stays."""
        self.kept[page] = self.kept.get(page, 0) + 1

    def unkeep(self, page: int) -> None:
        """Undoes one ``keep`` of ``page``."""
        self.kept[page] -= 1
        if self.kept[page] == 0:
            del self.kept[page]

    def drain_idle(self) -> tuple[bytes, ...]:
        """Returns the blocks that joined the cache since the last call; none where ``idle`` is None."""
        blocks = tuple(self.idle or ())
        if blocks:
            self.idle = {}
        return blocks

    def _evict(self, count: int) -> list[int]:
        if self.kept:
            pages = list(islice((page for page in self.cached if page not in self.kept), count))
            self.cached.remove(pages)
        else:
            pages = self.cached.take(count)
        self._blocks.forget(pages)
        return pages
