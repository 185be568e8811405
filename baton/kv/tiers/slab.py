"""Fixed slots for pages in memory that somebody else mapped: bounded, least recently used goes first, checksummed.

Knows nothing of files, threads or who computes the pages. One thread writes and reads; membership may be asked from
any. A slot's record is written last and carries its own checksum, so that whoever maps the same bytes after a
kill -9 finds every slot either whole or absent; a page's checksum is verified each time it is read.

    record: hash 32 | page xxh3 8 | last use 8 | reserved 8 | xxh3 of the 56 bytes before 8
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

from baton.kv import copying

_RECORD = struct.Struct("<32sQQQQ")
RECORD_BYTES = _RECORD.size
_SIGNED = RECORD_BYTES - 8
_BLANK = bytes(RECORD_BYTES)


class Slab:
    """``pages`` is (slots, page_bytes) uint8, ``records`` slots x 64 bytes; what is valid in them is kept."""

    def __init__(self, pages: NDArray[np.uint8], records: memoryview) -> None:
        self.stored = self.loaded = self.evicted = self.damaged = 0
        self._pages, self._records = pages, records
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # hash -> slot, least recently used first
        self._sums: dict[int, int] = {}
        self._tick = 0
        self._recover()
        used = set(self._slots.values())
        self._free = [slot for slot in range(len(pages) - 1, -1, -1) if slot not in used]

    @property
    def capacity(self) -> int:
        """Slots, used or not."""
        return len(self._pages)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block: bytes) -> bool:
        return block in self._slots

    def hashes(self) -> tuple[bytes, ...]:
        """What is here, least recently used first."""
        return tuple(self._slots)

    def touch(self, block: bytes) -> None:
        """It was used now."""
        slot = self._slots.get(block)
        if slot is not None:
            self._slots.move_to_end(block)
            self._record(slot, block)

    def put(self, block: bytes, page: memoryview) -> bytes | None:
        """Keep a copy of ``page``; the hash that had to go for it, if one had to. Known blocks are only touched."""
        if block in self._slots:
            self.touch(block)
            return None
        gone = None if self._free else self._evict()
        slot = self._free.pop()
        [self._sums[slot]] = copying.copy([self._pages[slot].data], [page])
        self._slots[block] = slot
        self._record(slot, block)
        self.stored += 1
        return gone

    def load(self, block: bytes, into: memoryview) -> bool:
        """Copy the page of ``block`` to ``into`` and verify the copy; False where it is absent or was damaged."""
        slot = self._slots.get(block)
        if slot is None:
            return False
        if copying.copy([into], [self._pages[slot].data]) != [self._sums[slot]]:
            self.damaged += 1
            self.drop(block)
            return False
        self.loaded += 1
        return True

    def drop(self, block: bytes) -> None:
        """Forget it; unknown blocks are no error."""
        slot = self._slots.pop(block, None)
        if slot is not None:
            self._blank(slot)

    def check(self) -> None:
        """Assert that each slot holds one block or none."""
        used = list(self._slots.values())
        assert len(set(used)) == len(used), "two blocks share a slot"
        assert sorted([*used, *self._free]) == list(range(self.capacity)), "a slot is lost, or both free and used"
        assert self._sums.keys() == set(used), "checksums and slots differ"

    def _evict(self) -> bytes:
        block, slot = self._slots.popitem(last=False)
        self._blank(slot)
        self.evicted += 1
        return block

    def _blank(self, slot: int) -> None:
        """First the record: a slot that is being written must not pass for its old block."""
        self._records[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = _BLANK
        self._sums.pop(slot, None)
        self._free.append(slot)

    def _record(self, slot: int, block: bytes) -> None:
        self._tick += 1
        signed = _RECORD.pack(block, self._sums[slot], self._tick, 0, 0)[:_SIGNED]
        at = slot * RECORD_BYTES
        self._records[at : at + RECORD_BYTES] = signed + struct.pack("<Q", xxhash.xxh3_64_intdigest(signed))

    def _recover(self) -> None:
        """Take over the records that are whole, in their order of use; blank the others."""
        found = []
        for slot in range(len(self._pages)):
            raw = bytes(self._records[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES])
            if raw == _BLANK:
                continue
            block, checksum, used, _, signature = _RECORD.unpack(raw)
            if xxhash.xxh3_64_intdigest(raw[:_SIGNED]) == signature:
                found.append((used, slot, block, checksum))
            else:
                self.damaged += 1
                self._records[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = _BLANK
        for used, slot, block, checksum in _youngest(found):
            self._slots[block], self._sums[slot], self._tick = slot, checksum, used


def _youngest(found: Iterable[tuple[int, int, bytes, int]]) -> list[tuple[int, int, bytes, int]]:
    """By use, oldest first; of two records of one block (never written by us) the younger."""
    by_block = {record[2]: record for record in sorted(found)}
    return sorted(by_block.values())
