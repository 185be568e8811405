"""The page pool: which page holds what, who leases it, and what may be reused. Torch-free, single-threaded.

Knows nothing of bytes, sockets, sequences or time: pages are numbers, blocks are hashes.

A page is in exactly one state:

    free ──open/extend──> leased ──close──> free          (not sealed)
      ^                     │ ^ ──close──> cached         (sealed: its hash is findable)
      └───────evict─────────┼─┴──match───── cached
                            └──close while I/O holds──> quarantined ──release──> free or cached

A sealed page may be shared: it is leased while any lease has it. Eviction takes the least recently used
cached page, and a chain's tail before its head (pages are given back tail first). A sealed page that is *kept*
(a copy of it is being made) stays in its state and its place, but isn't evicted meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, islice
from operator import not_
from typing import Any, NamedTuple

from baton.kv.pages.lease import PageLease
from baton.kv.pages.lru import PageOrder
from baton.protos.errors import PoolExhausted
from baton.protos.nouns import BLOCK_TOKENS

__all__ = ["PageLease", "PagePool", "PoolCounts"]


class PoolCounts(NamedTuple):
    """Pages by state (free + cached + leased + quarantined == pages), and open leases."""

    pages: int
    free: int
    cached: int
    leased: int
    quarantined: int
    leases: int


class PagePool:
    """``pages`` pages, numbered from 0, all free at first. ``block_tokens``: of one page, for those who ask.

    ``watched`` False: nobody asks for changes, and none are kept.
    """

    def __init__(self, pages: int, block_tokens: int = BLOCK_TOKENS, watched: bool = True) -> None:
        self.pages, self.block_tokens = pages, block_tokens
        self._free = list(range(pages - 1, -1, -1))
        self._cached = PageOrder(pages)
        self._refs = [0] * pages
        self._io: dict[int, int] = {}  # by page of a closed lease: holds that are still out
        self._hash: list[bytes | None] = [None] * pages
        self._by_hash: dict[bytes, int] = {}
        self._leases: set[PageLease] = set()
        self._leased = 0
        self._quarantined = 0
        self._watched = watched
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._kept: dict[int, int] = {}
        self.version = 0  # while it stays, `match` finds what it found
        self.idle: dict[bytes, None] | None = None  # a dict: blocks nobody leases any more, in the order they came

    @property
    def available(self) -> int:
        """Pages that a lease could get now: free, or cached and evictable."""
        kept = sum(page in self._cached for page in self._kept) if self._kept else 0
        return len(self._free) + len(self._cached) - kept

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are findable here."""
        known = self._by_hash
        if not hashes or hashes[0] not in known:
            return 0
        return next(compress(range(len(hashes)), map(not_, map(known.__contains__, hashes))), len(hashes))

    def open(
        self, hashes: Sequence[bytes], blocks: int, reserve: int = 0, limit_held: int | None = None
    ) -> PageLease:
        """Lease ``blocks`` pages, the first ``held`` of them being cached blocks of ``hashes``.

        At most ``limit_held`` are taken from the cache. ``reserve`` pages stay available to others. Raises
        PoolExhausted, with nothing changed, when that can't be.
        """
        limit = blocks if limit_held is None else min(blocks, limit_held)
        found = list(map(self._by_hash.__getitem__, hashes[: self.match(hashes[:limit])]))
        needed = blocks - len(found)
        if self.available - blocks < reserve:  # else it is enough even if every one of them is cached
            pinned = sum(page in self._cached and page not in self._kept for page in found)
            self._require(needed, reserve, pinned)
        self._pin(found)
        lease = PageLease(self, found + self._allocate(needed), len(found))
        self._leases.add(lease)
        return lease

    def snapshot_counts(self) -> PoolCounts:
        """The pool, counted now."""
        free, cached = len(self._free), len(self._cached)
        return PoolCounts(self.pages, free, cached, self._leased, self._quarantined, len(self._leases))

    def findable(self) -> tuple[bytes, ...]:
        """Every hash that ``match`` would find: what a lost prefix index is rebuilt from."""
        return tuple(self._by_hash)

    def drain_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Hashes that became findable and those that are gone since the last call, net."""
        changes = tuple(self._added), tuple(self._removed)
        self._added, self._removed = {}, {}
        return changes

    def keep(self, block: bytes) -> int | None:
        """The page of a findable block, not to be evicted until ``unkeep``; its place in the order stays."""
        page = self._by_hash.get(block)
        if page is not None:
            self._kept[page] = self._kept.get(page, 0) + 1
        return page

    def unkeep(self, page: int) -> None:
        """Undo one ``keep``."""
        self._kept[page] -= 1
        if self._kept[page] == 0:
            del self._kept[page]

    def drain_idle(self) -> tuple[bytes, ...]:
        """Blocks that joined the cache (tails first) since the last call; none unless ``idle`` was made a dict."""
        blocks = tuple(self.idle or ())
        if blocks:
            self.idle = {}
        return blocks

    def check(self) -> None:
        """Assert that each page is in exactly one state and that every count and index agrees."""
        refs = [0] * self.pages
        for lease in self._leases:
            assert len(set(lease.pages)) == len(lease.pages), "a lease has a page twice"
            for page in lease.pages:
                refs[page] += 1
        assert refs == self._refs, "reference counts differ from the open leases"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        for page in range(self.pages):
            self._check_page(page, page in free, page in cached)
        assert self._leased == sum(r > 0 for r in refs), "the count of leased pages is off"
        assert self._quarantined == sum(refs[page] == 0 for page in self._io)
        assert len(self._by_hash) == sum(h is not None for h in self._hash), "the hash index is off"
        assert all(self._hash[page] is not None for page in self._kept), "a kept page was evicted"

    def _check_page(self, page: int, free: bool, cached: bool) -> None:
        block, busy = self._hash[page], self._refs[page] > 0 or page in self._io
        assert free == (not busy and block is None), f"page {page}: free list is wrong"
        assert cached == (not busy and block is not None), f"page {page}: cached list is wrong"
        assert block is None or self._by_hash[block] == page, f"page {page}: its hash finds another page"
        assert self._refs[page] < 2 or block is not None, f"page {page} is shared but not sealed"

    def _require(self, needed: int, reserve: int, pinned: int = 0) -> None:
        if self.available - pinned - needed >= reserve:
            return
        counts = self.snapshot_counts()
        raise PoolExhausted(
            f"{needed} more pages are needed and {reserve} must stay; of {counts.pages}, {counts.free} are free, "
            f"{counts.cached} cached. Retry later, or give the worker more pages.",
            "pages",
        )

    def _allocate(self, count: int) -> list[int]:
        left = max(0, len(self._free) - count)
        pages = self._free[left:][::-1]
        del self._free[left:]
        if len(pages) < count:
            pages += self._evict(count - len(pages))
        refs = self._refs
        for page in pages:
            refs[page] = 1
        self._leased += len(pages)
        return pages

    def _evict(self, count: int) -> list[int]:
        """The least recently used pages that nobody keeps; nobody finds their blocks any more."""
        cached, hashes, by_hash, watched = self._cached, self._hash, self._by_hash, self._watched
        self.version += 1
        if self._kept:
            pages = list(islice((page for page in cached if page not in self._kept), count))
            cached.remove(pages)
        else:
            pages = cached.take(count)
        for page in pages:
            block: Any = hashes[page]  # a cached page has one
            hashes[page] = None
            del by_hash[block]
            if watched:
                self._gone(block)
        return pages

    def _gone(self, block: bytes) -> None:
        if block in self._added:
            del self._added[block]
        else:
            self._removed[block] = None

    def _pin(self, pages: Sequence[int]) -> None:
        refs, io, idle = self._refs, self._io, []
        for page in pages:
            if refs[page] == 0:
                self._leased += 1
                if page in io:
                    self._quarantined -= 1
                else:
                    idle.append(page)
            refs[page] += 1
        self._cached.remove(idle)

    def _publish(self, page: int, block: bytes) -> bool:
        if self._hash[page] is not None:
            assert self._hash[page] == block, f"page {page} is sealed under another hash"
            return True
        if block in self._by_hash:
            return False
        self.version += 1
        self._hash[page], self._by_hash[block] = block, page
        if not self._watched:
            return True
        if block in self._removed:
            del self._removed[block]
        else:
            self._added[block] = None
        return True

    def _quarantine(self, pages: Sequence[int]) -> None:
        """A lease's pages that I/O still holds, tail first."""
        for page in reversed(pages):
            self._io[page] = self._io.get(page, 0) + 1
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._leased -= 1
                self._quarantined += 1

    def _unpin(self, pages: Sequence[int]) -> None:
        """A lease's pages that it holds alone, tail first: a long prompt has thousands."""
        refs, io, hashes, free, cached = self._refs, self._io, self._hash, self._free, []
        idle, left = self.idle, 0
        for page in reversed(pages):
            count = refs[page] = refs[page] - 1
            if count:
                continue
            left += 1
            block = hashes[page]
            if io and page in io:
                self._quarantined += 1
            elif block is None:
                free.append(page)
            else:
                cached.append(page)
                if idle is not None:
                    idle.pop(block, None)
                    idle[block] = None
        self._cached.add(cached)
        self._leased -= left

    def _unquarantine(self, page: int) -> None:
        self._io[page] -= 1
        if self._io[page]:
            return
        del self._io[page]
        if self._refs[page] == 0:
            self._quarantined -= 1
            self._settle(page)

    def _settle(self, page: int) -> None:
        block = self._hash[page]
        if block is None:
            self._free.append(page)
            return
        self._cached.add((page,))
        if self.idle is not None:
            self.idle.pop(block, None)
            self.idle[block] = None
