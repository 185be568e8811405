"""Leases the pages of one request, from ``PagePool.open`` to ``close``. Torch-free, single-threaded.

Knows nothing of who may get which page: that is the pool's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.kv.pages.pool import PagePool


LEAST_SLIDE = 4  # blocks given back at once, because every time a table is made anew


def first_seen(tokens: int, window: int, block_tokens: int) -> int:
    """Returns the first block that the token at place ``tokens`` sees, ``window`` tokens back, itself included."""
    return max(0, tokens - window + 1) // block_tokens if window else 0


def _stood_for(pages: list[int], gap: tuple[int, int]) -> list[int]:
    """``pages`` in the order of their blocks, with stand-ins for the blocks of ``gap``."""
    first, end = gap
    return pages[:first] + [pages[first]] * (end - first) + pages[first:] if end > first else pages


class PageLease:
    """Owns the pages of one request until ``close``. ``pages[i]`` is block i's; the first ``held`` were cached.

    The blocks of ``gap`` (from the first one to the one before the second) have no page, because no token to come
    sees them: with a ``window`` in tokens (0: none) ``slide`` gives pages back that are wholly outside of it. The
    blocks before the gap are always seen. In ``pages`` the page behind the gap stands for its blocks, so that a
    table names no page of another's.

    ``hinted`` is set where the client means to use the blocks again, which weighs when pages are evicted.

    ``hold`` says that another process may read or write the pages; while holds are out, pages of a closed
    lease stay in quarantine instead of being reused.
    """

    def __init__(
        self, pool: PagePool, pages: list[int], held: int, gap: tuple[int, int] = (0, 0), window: int = 0
    ) -> None:
        self.pages = _stood_for(pages, gap)
        self.held, self.gap, self.window = held, gap, window
        self.closed = self.hinted = False
        self._pool = pool
        self._holds = 0
        self._beside: list[int] = []  # pages of branches

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
        """Returns the pages that are there, in order, those of branches last."""
        first, end = self.gap
        return self.pages[:first] + self.pages[end:] + self._beside

    @property
    def hollow(self) -> int:
        """Returns how many blocks have no page."""
        return self.gap[1] - self.gap[0]

    @property
    def lacking(self) -> list[int]:
        """Returns the blocks whose pages others are to fill: those that weren't cached, but for the gap."""
        first, end = self.gap
        return [block for block in range(self.held, len(self.pages)) if not first <= block < end]

    def slide(self, tokens: int, shipped_from: int | None = None) -> None:
        """Gives back the pages that no token from place ``tokens`` on sees. They must be finished.

        Nothing happens while another process may touch the pages, except where ``shipped_from`` says that it reads
        none before that block, and for less than ``LEAST_SLIDE`` blocks. ``pages`` is another list then.
        """
        if not self.window or (self._holds and shipped_from is None):
            return
        first = first_seen(tokens, self.window, self._pool.block_tokens)
        first = min(first, len(self.pages) - 1 if shipped_from is None else shipped_from)
        sunk, end = self.gap
        if first - end >= LEAST_SLIDE:
            unseen, kept = self.pages[end:first], self.pages[:sunk] + self.pages[first:]
            self.gap = sunk, first
            self.pages = _stood_for(kept, self.gap)
            self._pool.give_back(unseen, self.hinted)

    def select(self, chosen: Sequence[int], first: int) -> None:
        """Keeps, of the blocks before ``first``, those that are ``chosen``, and gives the other pages back.

        They move to the front, in order: the gap lies behind them. They must be finished, and none be held by
        another process.
        """
        assert not self.hollow, "it has no gap yet"
        assert not self._holds, "somebody may read these pages by their places"
        before, kept = self.pages[:first], set(chosen)
        self.gap = len(chosen), first
        self.pages = _stood_for([*(before[block] for block in chosen), *self.pages[first:]], self.gap)
        self._pool.give_back([page for block, page in enumerate(before) if block not in kept], self.hinted)

    def extend(self, blocks: int, reserve: int = 0) -> None:
        """Adds ``blocks`` pages at the end, leaving ``reserve``. Raises PoolExhausted with nothing changed."""
        assert not self.closed, "a closed lease can't grow"
        self.pages.extend(self._pool.allocate(blocks, reserve))

    def branch(self, blocks: int, reserve: int = 0) -> list[int]:
        """Returns ``blocks`` more pages beside the table, for another continuation of the text.

        They are the lease's until ``prune``; ``reserve`` pages stay available to others. Raises PoolExhausted with
        nothing changed.
        """
        assert not self.closed, "a closed lease can't branch"
        found = self._pool.allocate(blocks, reserve)
        self._beside += found
        return found

    def graft(self, first: int, pages: Sequence[int]) -> None:
        """Lets ``pages`` of a branch hold the blocks from ``first`` on, none of them sealed.

        The pages that held them are the branch's now.
        """
        taken, put = self.pages[first : first + len(pages)], set(pages)
        self._beside = [page for page in self._beside if page not in put] + taken
        self.pages = [*self.pages[:first], *pages, *self.pages[first + len(taken) :]]

    def prune(self) -> None:
        """Gives the pages of branches back."""
        if self._beside:
            spare, self._beside = self._beside, []
            self._pool.give_back(spare)

    def shrink(self, blocks: int) -> None:
        """Gives back the pages behind the first ``blocks``, none of which may be sealed.

        ``pages`` is another list then: who follows a list that grows sees that this one didn't only grow.
        """
        assert not self.closed, "a closed lease has no pages to give back"
        spare, self.pages = self.pages[blocks:], self.pages[:blocks]
        self._pool.give_back(spare)

    def seal(self, index: int, block: bytes) -> bool:
        """Makes block ``index``, full and finished, findable. Returns False when its hash is cached elsewhere."""
        assert not self.closed, "a closed lease can't seal"
        self._pool.supply.cached.placed(self.pages[index : index + 1], index)
        return self._pool.blocks.publish(self.pages[index], block)

    def seal_run(self, first: int, blocks: Sequence[bytes]) -> None:
        """Seals the blocks that follow one another from ``first`` on, but for those without a page."""
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
        """Announces that another process reads or writes these pages until ``release``."""
        assert not self.closed, "a closed lease can't be held: its pages may be another's"
        self._holds += 1

    def release(self) -> None:
        """Ends one ``hold``. The last one frees the pages of a closed lease."""
        assert self._holds > 0, "release without hold"
        self._holds -= 1
        if self.closed and self._holds == 0:
            self._pool.release(self.own, self.hinted)

    def close(self) -> None:
        """Gives the pages back, the tail first. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self._pool.close(self, self._holds > 0)

    def __enter__(self) -> PageLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
