"""A store for a KV tier that can be made to fail, as a disk may, and what a crash leaves of a disk tier's files.

Knows nothing of what is kept.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

from baton.kv.tiers.slab import Store


class TierHealth:
    """A switch that says whether a worker's tiers fail at present."""

    def __init__(self) -> None:
        self.fails = False

    def touch(self) -> None:
        """Raises OSError if the tier's device is set to fail."""
        if self.fails:
            raise OSError(5, "Input/output error")


class FaultyStore:
    """Implements ``kv.tiers.slab.Store`` over another store. Operations fail while ``health`` says so, while
    ``allocate`` raises MemoryError, and once the process isn't ``alive``, of which its threads may not have heard.
    """

    def __init__(
        self, store: Store, health: TierHealth, alive: Callable[[], bool], allocate: Callable[[], None]
    ) -> None:
        self._store, self._health, self._alive, self._allocate = store, health, alive, allocate
        self.slots = store.slots

    def view(self, slot: int) -> memoryview:
        """Returns the memory of slot ``slot``."""
        return self._store.view(slot)

    def fetch(self, slot: int) -> None:
        """Reads the page of slot ``slot`` into its view. Raises OSError."""
        self._touch()
        self._store.fetch(slot)

    def flush(self, slot: int) -> None:
        """Writes the content of the view of slot ``slot`` to the store. Raises OSError."""
        self._touch()
        self._store.flush(slot)

    def record(self, slot: int, data: bytes) -> None:
        """Writes the record ``data`` of slot ``slot``. Raises OSError."""
        self._touch()
        self._store.record(slot, data)

    def records(self) -> bytes:
        """Returns the records of all slots, concatenated in slot order."""
        return self._store.records()

    def _touch(self) -> None:
        if not self._alive():
            raise OSError(errno.EBADF, "the process has ended")
        self._allocate()
        self._health.touch()


def damage(folder: Path, rng: random.Random) -> None:
    """Overwrites some stretches of a disk tier's files, as a machine that crashes may leave them."""
    for file in sorted(folder.iterdir()):
        with file.open("r+b") as opened:
            size = opened.seek(0, os.SEEK_END)
            for _ in range(rng.randint(0, 4)):
                opened.seek(rng.randrange(size))
                opened.write(rng.randbytes(rng.randint(1, 64)))
            opened.truncate(size)
