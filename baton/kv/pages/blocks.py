"""Indexes pages by block hash, and collects changes for a prefix index. Torch-free.

Knows nothing of leases, of free pages or of the order of use: it maps 32-byte hashes to page numbers and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import not_

from baton.kv.pages.window import first_seen


class BlockIndex:
    """Maps block hashes to pages. ``block_of[page]`` is a page's block hash or None, ``page_of[hash]`` the page
    that is found by it.

    ``version`` rises with every change: while it is the same, ``match`` returns the same. With ``watched`` False no
    changes are collected for ``drain_changes``.
    """

    def __init__(self, pages: int, watched: bool = True) -> None:
        self.block_of: list[bytes | None] = [None] * pages
        self.page_of: dict[bytes, int] = {}
        self.version = 0
        self._watched = watched
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def match(self, hashes: Sequence[bytes]) -> int:
        """Returns how many leading blocks of ``hashes`` can be found here by hash."""
        known = self.page_of
        if not hashes or hashes[0] not in known:
            return 0
        return next(compress(range(len(hashes)), map(not_, map(known.__contains__, hashes))), len(hashes))

    def match_window(
        self, hashes: Sequence[bytes], window: int, block_tokens: int, wanted_from: int, sunk: int = 0
    ) -> tuple[int, int]:
        """Returns (first, end): the longest prefix, of ``end`` blocks, whose blocks from ``first`` on are findable.

        Those include all that a token after the prefix attends to, ``window`` tokens back, and all from
        ``wanted_from`` on. The first ``sunk`` blocks, which it attends to as well, must be findable too. (0, 0) if
        there is none.
        """
        found, run = (0, 0), 0
        intact = self.match(hashes[:sunk]) == len(hashes[:sunk])
        for end, block in enumerate(hashes, 1):
            run = run + 1 if block in self.page_of else 0
            first = min(first_seen(end * block_tokens, window, block_tokens), wanted_from) if intact else 0
            if run and end - run <= first:
                found = first, end
        return found

    def publish(self, page: int, block: bytes) -> bool:
        """Makes ``page`` findable by hash ``block``. Returns False if another page is found by that hash
        already.
        """
        if self.block_of[page] is not None:
            assert self.block_of[page] == block, f"page {page} is sealed under another hash"
            return True
        if block in self.page_of:
            return False
        self.version += 1
        self.block_of[page], self.page_of[block] = block, page
        if not self._watched:
            return True
        if block in self._removed:
            del self._removed[block]
        else:
            self._added[block] = None
        return True

    def publish_run(self, pages: Sequence[int], blocks: Sequence[bytes]) -> None:
        """Makes each of ``pages`` findable by its hash in ``blocks``, except those of whose hash another page is
        findable.
        """
        block_of, page_of, watched = self.block_of, self.page_of, self._watched
        added, removed = self._added, self._removed
        self.version += 1
        for page, block in zip(pages, blocks, strict=True):
            if block_of[page] is not None:
                self.publish(page, block)
                continue
            if page_of.setdefault(block, page) != page:
                continue  # it is cached elsewhere
            block_of[page] = block
            if not watched:
                continue
            if block in removed:
                del removed[block]
            else:
                added[block] = None

    def forget(self, pages: Iterable[int]) -> None:
        """Removes the blocks of ``pages``, each of which must have one, so that they are no longer found by
        hash.
        """
        block_of, page_of, watched = self.block_of, self.page_of, self._watched
        added, removed = self._added, self._removed
        self.version += 1
        for page in pages:
            block = block_of[page]
            assert block is not None, f"page {page} holds no block"
            block_of[page] = None
            del page_of[block]
            if not watched:
                continue
            if block in added:
                del added[block]
            else:
                removed[block] = None

    @property
    def has_lost(self) -> bool:
        """Returns whether blocks ceased to be findable since the last ``drain_changes``."""
        return bool(self._removed)

    def drain_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Returns the hashes that became findable and those that ceased to be since the last call, net."""
        changes = tuple(self._added), tuple(self._removed)
        self._added, self._removed = {}, {}
        return changes
