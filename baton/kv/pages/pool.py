"""Leases pages to requests, finds cached blocks by hash and evicts pages that are not leased. Torch-free.

Knows nothing of bytes, sockets, sequences or time: pages are numbers, blocks are hashes. Single-threaded. Each part
of the pool's state has its own class: the block index (``blocks``), pages without a lease (``supply``), the count
of leases and the quarantine (``page_users``).

A page is in exactly one state:

    free ──open/extend──> leased ──close──> free          (not sealed)
      ^                     │ ^ ──close──> cached         (sealed: its hash is findable)
      └───────evict─────────┼─┴──match───── cached
                            └──close while I/O holds──> quarantined ──release──> free or cached

A sealed page may be shared: it is leased while any lease has it. Eviction takes the least valuable cached page
(``worth.py``; with ``eviction`` "lru" the least recently used one), and a chain's tail before its head: pages are
given back tail first. A sealed page that is *kept* (while a copy of it is being made) keeps its state and its
place, but isn't evicted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

from baton.kv.pages.blocks import BlockIndex
from baton.kv.pages.lease import PageLease
from baton.kv.pages.lru import PageOrder
from baton.kv.pages.page_users import LeaseCounts, Quarantine
from baton.kv.pages.supply import PageSupply
from baton.kv.pages.window import growth
from baton.kv.pages.worth import WorthOrder
from baton.protos.errors import PoolExhausted
from baton.protos.nouns import BLOCK_TOKENS

__all__ = ["PageLease", "PagePool", "PoolCounts"]


MOST_BLOCKS = 1 << 40  # more than any chain has


class PoolCounts(NamedTuple):
    """Numbers of pages by state (free + cached + leased + quarantined == pages), and of open leases."""

    pages: int
    free: int
    cached: int
    leased: int
    quarantined: int
    leases: int


class PagePool:
    """Manages ``pages`` pages, numbered from 0, all free at first, of ``block_tokens`` tokens each.

    ``blocks`` maps hashes to pages, ``supply`` has the pages without a lease, ``leased`` counts leases by page,
    ``quarantine`` has pages that I/O of closed leases may still access, ``open_leases`` those not closed yet.
    ``taken``, unless it is None, hears of pages that a lease gets to write. With ``watched`` False no changes are
    collected for ``drain_changes``.
    """

    def __init__(
        self,
        pages: int,
        block_tokens: int = BLOCK_TOKENS,
        watched: bool = True,
        eviction: Literal["worth", "lru"] = "worth",
    ) -> None:
        self.pages, self.block_tokens = pages, block_tokens
        self.blocks = BlockIndex(pages, watched)
        cached = WorthOrder(pages, self.blocks.block_of) if eviction == "worth" else PageOrder(pages)
        self.supply = PageSupply(pages, self.blocks, cached)
        self.leased = LeaseCounts(pages)
        self.quarantine = Quarantine()
        self.open_leases: set[PageLease] = set()
        self.taken: Callable[[Sequence[int]], None] | None = None

    @property
    def available(self) -> int:
        """Returns how many pages could be leased now: free ones, and cached ones that may be evicted."""
        return self.supply.available

    @property
    def version(self) -> int:
        """Returns a number that rises whenever the findable blocks change: while it is the same, ``match`` returns
        the same.
        """
        return self.blocks.version

    def match(self, hashes: Sequence[bytes]) -> int:
        """Returns how many leading blocks of ``hashes`` have a page here that is findable by hash, cached or
        leased.
        """
        return self.blocks.match(hashes)

    def open(
        self,
        hashes: Sequence[bytes],
        blocks: int,
        reserve: int = 0,
        limit_held: int | None = None,
        window: int = 0,
        wanted_from: int = MOST_BLOCKS,
        sunk: int = 0,
        most: int = 0,
    ) -> PageLease:
        """Leases pages for ``blocks`` blocks, the first ``held`` of which are cached blocks of ``hashes``,
        ``limit_held`` at most.

        With a ``window`` in tokens (0: none), cached blocks to which no later token attends get no page (the
        lease's ``gap``), except the first ``sunk`` and those from ``wanted_from`` on; only the others need to be
        cached. ``reserve`` pages stay available to others. Raises PoolExhausted, with nothing changed, if there are
        too few pages.

        If ``most`` isn't 0, blocks after the next token's have no page yet: the lease grows (``reach``) while it
        gives pages back. The pages that it may need, ``most`` at once, stay available now.
        """
        limit, index = blocks if limit_held is None else min(blocks, limit_held), self.blocks
        if window:
            first, held = index.match_window(hashes[:limit], window, self.block_tokens, wanted_from, sunk)
        else:
            first, held = 0, index.match(hashes[:limit])
        if most:
            end = min(blocks, held + 1)
            shared = self.shared(hashes[max(first, sunk) : held])
            reserve, blocks = reserve + growth(end, max(first, sunk) - sunk, blocks, most, shared), end
        return self._lease(hashes, (sunk, max(first, sunk)), held, blocks, reserve, window)

    def open_behind(
        self,
        hashes: Sequence[bytes],
        first: int,
        blocks: int,
        reserve: int = 0,
        limit_held: int = 0,
        window: int = 0,
        sunk: int = 0,
    ) -> PageLease:
        """Leases pages for those of ``blocks`` blocks that others will fill: the blocks from ``first`` on, and the
        first ``sunk``.

        The blocks between have no page; ``held`` counts the leading blocks that are cached or have no page. Raises
        PoolExhausted.
        """
        first = max(min(first, blocks - 1), sunk)
        held = self.blocks.match(hashes[: min(sunk, limit_held)])
        if held == sunk:
            held = first + self.blocks.match(hashes[first:limit_held])
        return self._lease(hashes, (sunk, first), held, blocks, reserve, window)

    def _lease(
        self, hashes: Sequence[bytes], gap: tuple[int, int], held: int, blocks: int, reserve: int, window: int
    ) -> PageLease:
        """Leases pages for ``blocks`` blocks except those of ``gap``; the first of the others, up to ``held``, are
        cached.
        """
        first, end = gap
        cached = (*hashes[: min(first, held)], *hashes[end:held])
        pages = self.acquire(cached, max(0, blocks - end) + min(first, blocks), reserve)
        lease = PageLease(self, pages, held, gap, window)
        self.open_leases.add(lease)
        return lease

    def shared(self, cached: Sequence[bytes]) -> int:
        """Returns how many of the findable blocks ``cached`` are leased."""
        return self.leased.more_than(0, list(map(self.blocks.page_of.__getitem__, cached)))

    def acquire(self, cached: Sequence[bytes], wanted: int, reserve: int) -> list[int]:
        """Returns ``wanted`` pages with one lease more each; the first are those of the findable blocks ``cached``.

        Raises PoolExhausted, with nothing changed, if fewer than ``reserve`` would stay available.
        """
        found = list(map(self.blocks.page_of.__getitem__, cached))
        available, needed = self.supply.available, wanted - len(found)
        if available - wanted < reserve and available - self.supply.evictable(found) - needed < reserve:
            raise self._exhausted(needed, reserve)
        if found:
            self._pin(found)
        return found + self._take(needed)

    def allocate(self, count: int, reserve: int = 0) -> list[int]:
        """Returns ``count`` pages for a lease that grows, leaving ``reserve`` available. Raises PoolExhausted."""
        if self.supply.available - count < reserve:
            raise self._exhausted(count, reserve)
        return self._take(count)

    def give_back(self, pages: Sequence[int], hinted: Collection[int] = ()) -> None:
        """Takes one lease from each of ``pages``, which no other process accesses; those without any become free or
        cached.

        ``hinted`` are those that the client means to use again.
        """
        unleased = self.leased.drop(pages)
        self.supply.give_back(self.quarantine.enter(unleased) if self.quarantine.holds else unleased, hinted)

    def close(self, lease: PageLease, held: bool) -> None:
        """Ends ``lease`` and gives its pages back; if another process still accesses them (``held``), they stay in
        quarantine.
        """
        self.open_leases.discard(lease)
        if held:
            self.quarantine.add(lease.own, len(self.leased.drop(lease.own)))
        else:
            self.give_back(lease.own, lease.hinted)

    def release(self, pages: Sequence[int], hinted: Collection[int] = ()) -> None:
        """Takes the pages of a closed lease out of quarantine, after the last other process has released them."""
        self.supply.give_back(self.quarantine.release(pages, self.leased), hinted)

    def snapshot_counts(self) -> PoolCounts:
        """Returns the current number of pages in each state, and of open leases."""
        free, cached = len(self.supply.free), len(self.supply.cached)
        return PoolCounts(self.pages, free, cached, self.leased.count, self.quarantine.count, len(self.open_leases))

    def findable(self) -> tuple[bytes, ...]:
        """Returns the hash of every block that ``match`` would find, from which a lost prefix index can be
        rebuilt.
        """
        return tuple(self.blocks.page_of)

    def drain_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Returns the hashes that became findable and those that ceased to be since the last call, net."""
        return self.blocks.drain_changes()

    @property
    def has_evicted(self) -> bool:
        """Returns whether blocks were evicted since ``drain_changes``, if idle blocks are watched, so that a lower
        tier may still have them.
        """
        return self.supply.idle is not None and self.blocks.has_lost

    def priced(self, prefill_token: float, prefill_pair: float) -> None:
        """Sets the cost of computing KV: ``prefill_token`` seconds per token, plus ``prefill_pair`` seconds for
        each token before it.

        Blocks deep in their chain cost more to recompute, so they are evicted later than equally used ones.
        """
        if prefill_token > 0:
            self.supply.cached.priced(self.block_tokens * prefill_pair / prefill_token)

    def keep(self, block: bytes) -> int | None:
        """Forbids the eviction of the page with the block of hash ``block`` until ``unkeep``; returns the page,
        None if there is none.
        """
        page = self.blocks.page_of.get(block)
        if page is not None:
            self.supply.keep(page)
        return page

    def unkeep(self, page: int) -> None:
        """Reverts one ``keep`` of ``page``, which may be evicted once all are reverted."""
        self.supply.unkeep(page)

    def watch_idle(self) -> None:
        """Starts to collect the blocks that become cached and unleased, for ``drain_idle``."""
        self.supply.idle = {}

    def drain_idle(self) -> tuple[bytes, ...]:
        """Returns the hashes of the blocks that became cached and unleased since the last call, a lease's last
        block first.
        """
        return self.supply.drain_idle()

    def check(self) -> None:
        """Asserts that each page is in exactly one state and that every count and index agrees."""
        refs, leased, blocks = [0] * self.pages, self.leased, self.blocks
        used = set[int]()
        for lease in self.open_leases:
            own = set(lease.own)
            assert len(own) == len(lease.own), "a lease has a page twice"
            used |= own
            for page in own:
                refs[page] += 1
        assert refs == leased.of, "reference counts differ from the open leases"
        free, cached, waiting = set(self.supply.free), set(self.supply.cached), self.quarantine.holds
        assert len(free) == len(self.supply.free), "a page is free twice"
        sealed, idle = set(blocks.page_of.values()), set(range(self.pages)) - used - waiting.keys()
        assert free == idle - sealed, f"pages {sorted(free ^ (idle - sealed))}: free list is wrong"
        held = idle & sealed
        assert cached == held, f"pages {sorted(cached ^ held)}: cached list is wrong"
        lost = [page for block, page in blocks.page_of.items() if blocks.block_of[page] != block]
        assert not lost, f"pages {lost}: their hashes find other pages"
        shared = [page for page in used - sealed if refs[page] > 1]
        assert not shared, f"pages {shared} are shared but not sealed"
        assert leased.count == len(used), "the count of leased pages is off"
        assert self.quarantine.count == sum(refs[page] == 0 for page in waiting)
        assert self.pages - blocks.block_of.count(None) == len(sealed) == len(blocks.page_of), (
            "the hash index is off"
        )
        assert all(blocks.block_of[page] is not None for page in self.supply.kept), "a kept page was evicted"

    def _exhausted(self, needed: int, reserve: int) -> PoolExhausted:
        counts = self.snapshot_counts()
        return PoolExhausted(
            f"{needed} more pages are needed and {reserve} must stay; of {counts.pages}, {counts.free} are free, "
            f"{counts.cached} cached. Retry later, or give the worker more pages.",
            "pages",
        )

    def _take(self, count: int) -> list[int]:
        pages = self.supply.take(count)
        if self.taken is not None:
            self.taken(pages)
        self.leased.begin(pages)
        return pages

    def _pin(self, pages: list[int]) -> None:
        """Adds a lease to pages that are cached, quarantined or leased already."""
        first = self.leased.add(pages)
        self.supply.cached.remove(self.quarantine.leave(first) if self.quarantine.holds else first)
