"""A lease: the pages of one request, from ``PagePool.open`` to ``close``. Torch-free, single-threaded.

Knows nothing of who may get which page: that is the pool's. It is the pool's other half, and works on its tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.kv.pages.pool import PagePool


class PageLease:
    """Pages that one request owns until ``close``. ``pages[i]`` is block i's; the first ``held`` were cached.

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
        """Tokens in each page."""
        return self._pool.block_tokens

    @property
    def holds(self) -> int:
        """Holds that are out."""
        return self._holds

    def extend(self, blocks: int, reserve: int = 0) -> None:
        """Add ``blocks`` more pages. Raises PoolExhausted with nothing changed."""
        assert not self.closed, "a closed lease can't grow"
        self._pool._require(blocks, reserve)
        self.pages.extend(self._pool._allocate(blocks))

    def shrink(self, blocks: int) -> None:
        """Give back the pages behind the first ``blocks``, which hold nothing that is wanted and aren't sealed."""
        assert not self.closed, "a closed lease has no pages to give back"
        spare = self.pages[blocks:]
        del self.pages[blocks:]
        self._pool._unpin(spare)

    def seal(self, index: int, block: bytes) -> bool:
        """Block ``index`` is full and finished: others may find it. False when its hash is cached elsewhere."""
        assert not self.closed, "a closed lease can't seal"
        return self._pool._publish(self.pages[index], block)

    def seal_run(self, first: int, blocks: Sequence[bytes]) -> None:
        """``seal`` of the blocks that follow one another from ``first`` on."""
        assert not self.closed, "a closed lease can't seal"
        pages, hashes, by_hash = self.pages, self._pool._hash, self._pool._by_hash
        added, removed, watched = self._pool._added, self._pool._removed, self._pool._watched
        self._pool.version += 1
        for page, block in zip(pages[first : first + len(blocks)], blocks, strict=True):
            if hashes[page] is not None:
                self._pool._publish(page, block)
                continue
            if by_hash.setdefault(block, page) != page:
                continue  # it is cached elsewhere
            hashes[page] = block
            if not watched:
                continue
            if block in removed:
                del removed[block]
            else:
                added[block] = None

    def hold(self) -> None:
        """I/O on these pages begins."""
        assert not self.closed, "a closed lease can't be held: its pages may be another's"
        self._holds += 1

    def release(self) -> None:
        """I/O that ``hold`` announced is over. The last one frees a closed lease's pages."""
        assert self._holds > 0, "release without hold"
        self._holds -= 1
        if self.closed and self._holds == 0:
            for page in reversed(self.pages):
                self._pool._unquarantine(page)

    def close(self) -> None:
        """Give the pages back, tail first; again does nothing."""
        if self.closed:
            return
        self.closed = True
        self._pool._leases.discard(self)
        if not self._holds:
            self._pool._unpin(self.pages)
        else:
            self._pool._quarantine(self.pages)

    def __enter__(self) -> PageLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
