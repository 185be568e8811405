"""Counts the users of each page: leases, and I/O of closed leases that is still in progress. Torch-free.

Knows nothing of hashes, of free pages or of leases' owners.
"""

from __future__ import annotations

from collections.abc import Sequence


class LeaseCounts:
    """Counts the leases of each page: ``of[page]``. ``count`` is the number of pages that have at least one."""

    def __init__(self, pages: int) -> None:
        self.of = [0] * pages
        self.count = 0

    def more_than(self, leases: int, pages: Sequence[int]) -> int:
        """Returns how many of ``pages`` have more than ``leases`` leases."""
        of = self.of
        return sum(of[page] > leases for page in pages)

    def begin(self, pages: Sequence[int]) -> None:
        """Gives each of ``pages``, none of which is leased, its first lease."""
        of = self.of
        for page in pages:
            of[page] = 1
        self.count += len(pages)

    def add(self, pages: Sequence[int]) -> list[int]:
        """Adds one lease to each of ``pages``. Returns those that had none before."""
        of, first = self.of, []
        for page in pages:
            if of[page] == 0:
                first.append(page)
            of[page] += 1
        self.count += len(first)
        return first

    def drop(self, pages: Sequence[int]) -> list[int]:
        """Removes one lease from each of ``pages``. Returns those that have none any more, in reverse order."""
        of, last = self.of, []
        for page in reversed(pages):
            left = of[page] = of[page] - 1
            if not left:
                last.append(page)
        self.count -= len(last)
        return last


class Quarantine:
    """Keeps pages of closed leases that another process may still read or write.

    ``holds[page]`` counts these reads and writes; ``count`` is the number of such pages without a lease.
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
        """Adjusts ``count`` for ``pages`` that are leased again. Returns those that were not in quarantine."""
        outside = [page for page in pages if page not in self.holds]
        self.count -= len(pages) - len(outside)
        return outside

    def enter(self, pages: list[int]) -> list[int]:
        """Adjusts ``count`` for ``pages`` that lost their last lease. Returns those of them that are not in
        quarantine.
        """
        outside = [page for page in pages if page not in self.holds]
        self.count += len(pages) - len(outside)
        return outside

    def release(self, pages: Sequence[int], leases: LeaseCounts) -> list[int]:
        """Ends one hold of each page. Returns those without any hold or lease, in reverse order."""
        over = [page for page in reversed(pages) if self._released(page) and not leases.of[page]]
        self.count -= len(over)
        return over

    def _released(self, page: int) -> bool:
        self.holds[page] -= 1
        if self.holds[page]:
            return False
        del self.holds[page]
        return True
