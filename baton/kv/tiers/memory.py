"""The host tier: a slab in this process's memory, gone with it. Knows nothing of what is in it."""

from __future__ import annotations

import mmap

import numpy as np

from baton.kv.tiers.slab import RECORD_BYTES, Slab


def host_slab(capacity_bytes: int, page_bytes: int) -> Slab | None:
    """As many pages as fit ``capacity_bytes``; None when not one does. Memory is taken as it is touched."""
    slots = capacity_bytes // (page_bytes + RECORD_BYTES)
    if slots < 1:
        return None
    pages = np.frombuffer(mmap.mmap(-1, slots * page_bytes), np.uint8).reshape(slots, page_bytes)
    return Slab(pages, memoryview(mmap.mmap(-1, slots * RECORD_BYTES)))
