"""Leases the pages of one request, from ``PagePool.open`` to ``close``. Torch-free, single-threaded.

Knows nothing of who may get which page: that is the pool's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.kv.pages.pool import PagePool


class PageLease:
    """Owns the pages of one request until ``close``. ``pages[i]`` is block i's; the first ``held`` were cached.

    ``hold`` says that another process may read or write the pages; while holds are out, pages of a closed
    lease stay in quarantine instead of being reused.
    """

    def __init__(self, pool: PagePool, pages: list[int], held: int) -> None:
        self.pages = pages
        self.held = held
        self.closed = False
        self._pool = pool
        self._holds = 0

    @property
    def block_tokens(self) -> int:
        """Returns the number of tokens in each page."""
        return self._pool.block_tokens

    @property
    def holds(self) -> int:
        """Returns the number of ``hold`` calls without a ``release`` yet."""
        return self._holds

    def extend(self, blocks: int, reserve: int = 0) -> None:
        """Adds ``blocks`` pages at the end, leaving ``reserve``. Raises PoolExhausted with nothing changed."""
        assert not self.closed, "a closed lease can't grow"
        self.pages.extend(self._pool.allocate(blocks, reserve))

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
        """Seals the blocks that follow one another from ``first`` on."""
        assert not self.closed, "a closed lease can't seal"
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
            self._pool.release(self.pages)

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
