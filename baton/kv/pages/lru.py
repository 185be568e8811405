"""Keeps pages in the order in which they were last used, as a linked list in two lists of numbers. Torch-free.

Knows nothing of what pages hold. An OrderedDict would do the same with seven times the memory and twice the time: a
long prompt's thousands of pages come and go at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

ABSENT = -1


class PageOrder:
    """Orders some of the pages 0 … ``pages`` - 1, the least recently used first."""

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

    def add(self, pages: Iterable[int], hinted: bool = False) -> None:
        """Appends ``pages`` in this order; none of them may be there. A hint changes nothing."""
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
        """Does nothing: where a block stands in its chain doesn't matter."""

    def priced(self, pair_cost: float) -> None:
        """Does nothing: what a block costs doesn't matter."""

    def handed_out(self, pages: int) -> None:
        """Does nothing: the order of use has no clock."""

    def take(self, count: int, kept: Collection[int] = ()) -> list[int]:
        """Removes and returns the first ``count`` pages that aren't ``kept``; there must be as many."""
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

    def remove(self, pages: Sequence[int]) -> None:
        """Removes each of ``pages`` from wherever it is; all must be there."""
        after, before = self._next, self._before
        for page in pages:
            left, right = before[page], after[page]
            after[left], before[right] = right, left
            after[page] = ABSENT
        self._count -= len(pages)
