"""A tier's store that may be slow or fail, as a disk. Knows nothing of what is kept."""

from __future__ import annotations

from baton.kv.tiers.slab import Store


class TierHealth:
    """Says whether a slot's tiers fail now. How slow they are says the loop, which runs their threads."""

    def __init__(self) -> None:
        self.fails = False

    def touch(self) -> None:
        """Raises OSError where the device fails."""
        if self.fails:
            raise OSError(5, "Input/output error")


class FaultyStore:
    """Implements ``kv.tiers.slab.Store`` by another one that fails as its ``health`` says."""

    def __init__(self, store: Store, health: TierHealth) -> None:
        self._store, self._health = store, health
        self.slots = store.slots

    def view(self, slot: int) -> memoryview:
        """Returns the memory of a slot."""
        return self._store.view(slot)

    def fetch(self, slot: int) -> None:
        """Brings the page of a slot to its view. Raises OSError."""
        self._health.touch()
        self._store.fetch(slot)

    def flush(self, slot: int) -> None:
        """Stores what lies in the view of a slot. Raises OSError."""
        self._health.touch()
        self._store.flush(slot)

    def record(self, slot: int, data: bytes) -> None:
        """Writes a slot's record. Raises OSError."""
        self._health.touch()
        self._store.record(slot, data)

    def records(self) -> bytes:
        """Returns the records of all slots, in the order of the slots, as the store beneath keeps them."""
        return self._store.records()
