"""Counts who has a page: leases, and reads or writes of closed leases that are still out. Torch-free.

Knows nothing of hashes, of free pages or of who holds a lease.
"""

from __future__ import annotations

from collections.abc import Sequence


class LeaseCounts:
    """Counts the leases of each page. ``count`` is the number of pages that at least one lease has."""

    def __init__(self, pages: int) -> None:
        self.of = [0] * pages
        self.count = 0

    def begin(self, pages: Sequence[int]) -> None:
        """Gives each of ``pages``, which no lease has, its first lease."""
        of = self.of
        for page in pages:
            of[page] = 1
        self.count += len(pages)

    def add(self, pages: Sequence[int]) -> list[int]:
        """Gives each of ``pages`` one lease more. Returns those that no lease had before."""
        of, first = self.of, []
        for page in pages:
            if of[page] == 0:
                first.append(page)
            of[page] += 1
        self.count += len(first)
        return first

    def drop(self, pages: Sequence[int]) -> list[int]:
        """Takes one lease from each of ``pages``. Returns those that no lease has any more, the last page first."""
        of, last = self.of, []
        for page in reversed(pages):
            left = of[page] = of[page] - 1
            if not left:
                last.append(page)
        self.count -= len(last)
        return last


class Quarantine:
    """Keeps pages of closed leases whose last read or write by another process is still out.

    ``holds[page]`` counts these reads and writes; ``count`` is the number of such pages that no lease has.
    """

    def __init__(self) -> None:
        self.holds: dict[int, int] = {}
        self.count = 0

    def add(self, pages: Sequence[int], unleased: int) -> None:
        """Adds one hold to each page of a closed lease; ``unleased`` of them have no other lease."""
        for page in pages:
            self.holds[page] = self.holds.get(page, 0) + 1
        self.count += unleased

    def leave(self, pages: list[int]) -> list[int]:
        """Counts out those of ``pages`` that are leased again. Returns the others, which were in no quarantine."""
        outside = [page for page in pages if page not in self.holds]
        self.count -= len(pages) - len(outside)
        return outside

    def enter(self, pages: list[int]) -> list[int]:
        """Counts in those of ``pages``, which no lease has now, that are held. Returns the others."""
        outside = [page for page in pages if page not in self.holds]
        self.count += len(pages) - len(outside)
        return outside

    def release(self, pages: Sequence[int], leases: LeaseCounts) -> list[int]:
        """Ends one hold of each page. Returns those that nothing holds or leases any more, the last page first."""
        over = [page for page in reversed(pages) if self._released(page) and not leases.of[page]]
        self.count -= len(over)
        return over

    def _released(self, page: int) -> bool:
        self.holds[page] -= 1
        if self.holds[page]:
            return False
        del self.holds[page]
        return True
