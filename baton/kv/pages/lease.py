"""Leases the pages of one request, from ``PagePool.open`` to ``close``. Torch-free, single-threaded.

Knows nothing of who may get which page: the pool decides that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Protocol

from baton.kv.pages.blocks import BlockIndex
from baton.kv.pages.page_users import LeaseCounts
from baton.kv.pages.supply import PageSupply
from baton.kv.pages.window import first_seen, growth
from baton.protos.nouns import EVERY_BLOCK

LEAST_SLIDE = 4  # least blocks given back at once, because each time a new table is made


def _stood_for(pages: list[int], gap: tuple[int, int]) -> list[int]:
    """Returns ``pages`` in the order of their blocks, with stand-ins for the blocks of ``gap``."""
    first, end = gap
    return pages[:first] + [pages[first]] * (end - first) + pages[first:] if end > first else pages


class LeasedPool(Protocol):
    """A pool as its leases use it (``PagePool``)."""

    @property
    def block_tokens(self) -> int:
        """Returns the tokens that a page holds."""

    @property
    def supply(self) -> PageSupply:
        """Returns the pages that nobody has leased."""

    @property
    def blocks(self) -> BlockIndex:
        """Returns which page holds which block."""

    @property
    def leased(self) -> LeaseCounts:
        """Returns how many leases each page has."""

    def allocate(self, count: int, reserve: int = 0) -> list[int]:
        """Returns ``count`` pages, leaving ``reserve`` available. Raises PoolExhausted."""

    def give_back(self, pages: list[int], hinted: Collection[int] = ()) -> None:
        """Takes one lease from each of ``pages``, which no other process accesses."""

    def release(self, pages: list[int], hinted: Collection[int] = ()) -> None:
        """Takes the pages of a closed lease out of quarantine."""

    def close(self, lease: PageLease, held: bool) -> None:
        """Ends ``lease``; its pages stay in quarantine if another process still accesses them (``held``)."""


class PageLease:
    """Owns the pages of one request until ``close``. ``pages[i]`` is that of block i; the first ``held`` blocks
    were cached.

    The blocks of ``gap``, a range (first, end), have no page, because no later token attends to them: with a
    ``window`` in tokens (0: none) ``slide`` gives back pages that are entirely outside of it. The blocks before the
    gap are always attended to. In ``pages`` the page after the gap stands in for those of the gap's blocks, so that
    no table contains a page of another lease.
    ``hinted_blocks`` is how many leading blocks the client means to use again, which makes their eviction less
    likely. ``hold`` says that another process may read or write the pages; until every hold is released, pages of a
    closed lease stay in quarantine instead of being reused.
    """

    def __init__(
        self, pool: LeasedPool, pages: list[int], held: int, gap: tuple[int, int] = (0, 0), window: int = 0
    ) -> None:
        self.pages = _stood_for(pages, gap)
        self.held, self.gap, self.window = held, gap, window
        self.closed, self.hinted_blocks = False, 0
        self._pool = pool
        self._holds = 0
        self._beside: list[int] = []  # pages of branches
        self._left: list[int] = []  # pages of no block any more, which another process may still access

    @property
    def block_tokens(self) -> int:
        """Returns the number of tokens in each page."""
        return self._pool.block_tokens

    @property
    def holds(self) -> int:
        """Returns the number of ``hold`` calls without a ``release`` yet."""
        return self._holds

    @property
    def own(self) -> list[int]:
        """Returns the leased pages, in the order of their blocks, those of branches and of no block last."""
        first, end = self.gap
        return self.pages[:first] + self.pages[end:] + self._beside + self._left

    @property
    def hinted(self) -> frozenset[int]:
        """Returns the leased pages of the blocks that the client means to use again."""
        (first, end), count = self.gap, self.hinted_blocks
        if count == EVERY_BLOCK:
            return frozenset(self.own)
        return frozenset(self.pages[: min(first, count)] + self.pages[end:count])

    @property
    def tables(self) -> tuple[list[int], ...]:
        """Returns the page tables beside ``pages``, where blocks have several pages (``TablesLease``)."""
        return ()

    @property
    def blocks(self) -> int:
        """Returns the number of leading blocks that have all pages that tokens in them write."""
        return len(self.pages)

    @property
    def landing(self) -> list[int]:
        """Returns the pages that a handoff may write, by its block index; this very list if they are ``pages``."""
        return self.pages

    @property
    def hollow(self) -> int:
        """Returns how many blocks have no page."""
        return self.gap[1] - self.gap[0]

    @property
    def lacking(self) -> list[int]:
        """Returns the indices of the blocks that have to be computed or received: those not cached, except the
        gap's.
        """
        first, end = self.gap
        return [block for block in range(self.held, len(self.pages)) if not first <= block < end]

    def slide(self, tokens: int, shipped_from: int | None = None) -> None:
        """Gives back the pages to which no token from position ``tokens`` on attends. Their blocks must be
        completely written.

        Nothing happens for less than ``LEAST_SLIDE`` blocks, or while another process may access the pages, unless
        ``shipped_from`` says that it reads none before that block. ``pages`` is a new list afterwards.
        """
        if not self.window or (self._holds and shipped_from is None):
            return
        first = first_seen(tokens, self.window, self._pool.block_tokens)
        last = len(self.pages) - 1
        first = min(first, last if shipped_from is None else min(last, shipped_from))
        sunk, end = self.gap
        if first - end >= LEAST_SLIDE:
            hinted = self.hinted
            unseen, kept = self.pages[end:first], self.pages[:sunk] + self.pages[first:]
            self.gap = sunk, first
            self.pages = _stood_for(kept, self.gap)
            self._pool.give_back(unseen, hinted)

    def select(self, chosen: Sequence[int], first: int) -> None:
        """Keeps, of the pages before block ``first``, those of indices ``chosen``, and gives the others back.

        The blocks of an earlier gap have no pages and aren't counted. The kept ones become the first blocks, in
        order; the gap follows them. They must be finished. Pages that another process may access are given back
        when it has released them.
        """
        assert first >= self.gap[1], "the blocks of a gap have no pages to choose from"
        before, kept = self.pages[: self.gap[0]] + self.pages[self.gap[1] : first], set(chosen)
        self.gap = len(chosen), first
        self.pages = _stood_for([*(before[block] for block in chosen), *self.pages[first:]], self.gap)
        self._leave([page for block, page in enumerate(before) if block not in kept])

    def _leave(self, pages: list[int]) -> None:
        """Gives ``pages``, which are no block's any more, back as soon as no other process may access them."""
        self._left += pages
        if not self._holds:
            self._give_back_left()

    def _give_back_left(self) -> None:
        left, self._left = self._left, []
        self._pool.give_back(left, left if self.hinted_blocks == EVERY_BLOCK else ())

    def extend(self, blocks: int, reserve: int = 0) -> None:
        """Adds ``blocks`` pages at the end, leaving ``reserve`` available to others. Raises PoolExhausted with
        nothing changed.
        """
        assert not self.closed, "a closed lease can't grow"
        self.pages.extend(self._pool.allocate(blocks, reserve))

    def reach(self, blocks: int, reserve: int = 0) -> None:
        """Adds pages at the end until ``blocks`` blocks have theirs, leaving ``reserve`` available to others.

        Raises PoolExhausted with nothing changed.
        """
        if blocks > len(self.pages):
            self.extend(blocks - len(self.pages), reserve)

    def growth(self, blocks: int, most: Sequence[int]) -> int:
        """Returns how many pages more than now the lease may have at once until it has ``blocks`` blocks, if it
        never has more than the number in ``most``.
        """
        return growth(len(self.pages), self.hollow, blocks, most[0], self.shared)

    @property
    def shared(self) -> int:
        """Returns how many pages that ``slide`` may give back have another lease, too."""
        return self._pool.leased.more_than(1, self.pages[self.gap[1] :])

    def branch(self, blocks: int, reserve: int = 0) -> list[int]:
        """Leases ``blocks`` more pages outside of ``pages``, for an alternative continuation, and returns them.

        They belong to the lease until ``prune``; ``reserve`` pages stay available to others. Raises PoolExhausted
        with nothing changed.
        """
        assert not self.closed, "a closed lease can't branch"
        found = self._pool.allocate(blocks, reserve)
        self._beside += found
        return found

    def graft(self, first: int, pages: Sequence[int]) -> None:
        """Puts ``pages`` of a branch in the places of the blocks from ``first`` on.

        The pages that were there become the branch's. One that is sealed stays findable, and its readers keep it.
        """
        taken, put = self.pages[first : first + len(pages)], set(pages)
        self._beside = [page for page in self._beside if page not in put] + taken
        self.pages = [*self.pages[:first], *pages, *self.pages[first + len(taken) :]]

    def prune(self) -> None:
        """Gives the pages of branches back to the pool, when no other process may access the lease's pages."""
        if self._beside:
            spare, self._beside = self._beside, []
            self._leave(spare)

    def shrink(self, blocks: int) -> None:
        """Gives back the pages after the first ``blocks``, none of which may be sealed, when no other process may
        access the lease's pages.

        ``pages`` is a new list afterwards, so that users of a growing list notice that it didn't only grow.
        """
        assert not self.closed, "a closed lease has no pages to give back"
        spare, self.pages = self.pages[blocks:], self.pages[:blocks]
        self._leave(spare)

    def seal(self, index: int, block: bytes) -> bool:
        """Makes block ``index``, full and finished, findable by hash ``block``. Returns False if another page
        already is.
        """
        assert not self.closed, "a closed lease can't seal"
        self._pool.supply.cached.placed(self.pages[index : index + 1], index)
        return self._pool.blocks.publish(self.pages[index], block)

    def seal_run(self, first: int, blocks: Sequence[bytes]) -> None:
        """Makes consecutive blocks from index ``first`` on, full and finished, findable by the hashes ``blocks``;
        skips those without a page.
        """
        assert not self.closed, "a closed lease can't seal"
        begin, end = self.gap
        if first < end and begin < first + len(blocks) and self.hollow:
            before, behind = max(0, begin - first), end - first
            self._seal_run(first, blocks[:before])
            self._seal_run(end, blocks[behind:])
        else:
            self._seal_run(first, blocks)

    def _seal_run(self, first: int, blocks: Sequence[bytes]) -> None:
        pages = self.pages[first : first + len(blocks)]
        self._pool.supply.cached.placed(pages, first)
        self._pool.blocks.publish_run(pages, blocks)

    def hold(self) -> None:
        """Records that another process reads or writes these pages until ``release``."""
        assert not self.closed, "a closed lease can't be held: its pages may be another's"
        self._holds += 1

    def release(self) -> None:
        """Ends one ``hold`` of the pages. The last release frees the pages of a closed lease."""
        assert self._holds > 0, "release without hold"
        self._holds -= 1
        if self._holds:
            return
        if self.closed:
            self._pool.release(self.own, self.hinted)
        elif self._left:
            self._give_back_left()

    def close(self) -> None:
        """Gives the pages back to the pool, the last block first. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self._pool.close(self, self._holds > 0)

    def __enter__(self) -> PageLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
