"""Keeps pages in least-recently-used order, as a linked list in two lists of integers. Torch-free.

Knows nothing of what pages hold. An OrderedDict would do the same with seven times the memory and twice the time: a
long prompt's thousands of pages come and go at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

ABSENT = -1  # marks a page that is in no list


class PageOrder:
    """Keeps some of the pages 0 to ``pages`` - 1 in order of use, the least recently used first."""

    def __init__(self, pages: int) -> None:
        self._end = pages  # stands before the first and after the last
        self._next = [ABSENT] * pages + [pages]
        self._before = [ABSENT] * pages + [pages]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, page: int) -> bool:
        return self._next[page] != ABSENT

    def __iter__(self) -> Iterator[int]:
        page = self._next[self._end]
        while page != self._end:
            yield page
            page = self._next[page]

    def add(self, pages: Iterable[int], hinted: Collection[int] = ()) -> None:
        """Appends ``pages``, none of which may be there, in this order. ``hinted`` has no effect."""
        after, before, end = self._next, self._before, self._end
        last, count = before[end], 0
        for page in pages:
            after[last] = page
            before[page] = last
            last = page
            count += 1
        after[last], before[end] = end, last
        self._count += count

    def placed(self, pages: Sequence[int], first: int) -> None:
        """Does nothing, because a block's position in its chain doesn't affect this order."""

    def priced(self, pair_cost: float) -> None:
        """Does nothing, because the cost of a block doesn't affect this order."""

    def handed_out(self, pages: int) -> None:
        """Does nothing, because this order doesn't depend on pages handed out."""

    def take(self, count: int, kept: Collection[int] = ()) -> list[int]:
        """Removes and returns the first ``count`` pages that aren't in ``kept``; there must be that many."""
        assert count <= self._count, "not as many pages are there"
        if kept:
            pages = list(islice((page for page in self if page not in kept), count))
            self.remove(pages)
            return pages
        after, end = self._next, self._end
        page, taken = after[end], []
        for _ in range(count):
            taken.append(page)
            following = after[page]
            after[page] = ABSENT
            page = following
        after[end], self._before[page] = page, end
        self._count -= count
        return taken

    def discard(self, pages: Sequence[int]) -> None:
        """Removes each of ``pages``, all of which must be there."""
        self.remove(pages)

    def remove(self, pages: Sequence[int]) -> None:
        """Removes each of ``pages``, all of which must be there."""
        after, before = self._next, self._before
        for page in pages:
            left, right = before[page], after[page]
            after[left], before[right] = right, left
            after[page] = ABSENT
        self._count -= len(pages)
