"""Implements the host memory tier: a slab in this process's memory. Knows nothing of pages' contents."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from baton.kv.tiers.slab import RECORD_BYTES, Eviction, Slab


class MemoryStore:
    """Implements ``Store`` in memory, without errors.

    ``pages`` is (slots, page_bytes) uint8, ``kept`` has slots x 64 bytes of records.
    """

    def __init__(self, pages: NDArray[np.uint8], kept: memoryview) -> None:
        self.slots, self.pages, self.kept = len(pages), pages, kept

    def view(self, slot: int) -> memoryview:
        """Returns the page of ``slot``, without a copy."""
        return self.pages[slot].data

    def fetch(self, slot: int) -> None:
        """Does nothing, because the page is in its view."""

    def flush(self, slot: int) -> None:
        """Does nothing, because the page is in its view."""

    def record(self, slot: int, data: bytes) -> None:
        """Writes the 64-byte record of ``slot``."""
        self.kept[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = data

    def records(self) -> bytes:
        """Returns a copy of all records."""
        return bytes(self.kept)


def host_slab(capacity_bytes: int, page_bytes: int, eviction: Eviction = "worth") -> Slab | None:
    """Returns a slab in memory of as many pages as fit into ``capacity_bytes`` with their records, None if not one
    does.

    Physical memory is allocated when a page is first used.
    """
    slots = capacity_bytes // (page_bytes + RECORD_BYTES)
    if slots < 1:
        return None
    pages = np.frombuffer(mmap.mmap(-1, slots * page_bytes), np.uint8).reshape(slots, page_bytes)
    return Slab(MemoryStore(pages, memoryview(mmap.mmap(-1, slots * RECORD_BYTES))), eviction)
