"""The memory of simulated processes, which may run short. Knows nothing of what it is for."""

from __future__ import annotations

import random
from collections import Counter

SHARE = 0.2  # of the allocations of a process that is short of memory: they fail


class Memory:
    """Says of which process an allocation fails: of one that is ``short``, each with probability SHARE."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._short = rng, Counter[str]()
        self.failed = 0  # allocations

    def short(self, process: str, on: bool) -> None:
        """Makes ``process`` short of memory (``on``), or ends one such shortage; it ends with the last of them."""
        self._short[process] += 1 if on else -1
        assert self._short[process] >= 0, f"{process} isn't short of memory"

    def there_is(self, process: str) -> bool:
        """Returns whether an allocation of ``process`` succeeds."""
        if not self._short or not self._short[process] or self._rng.random() >= SHARE:
            return True
        self.failed += 1
        return False

    def allocate(self, process: str) -> None:
        """Stands for an allocation of ``process``. Raises MemoryError if it fails."""
        if not self.there_is(process):
            raise MemoryError
