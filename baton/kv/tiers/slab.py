"""Keeps pages in the fixed slots of a store, memory or files: bounded, checksummed, what is worth least out first.

Knows nothing of files, threads or who computes the pages. One thread writes and reads; membership may be asked from
any. A slot's record is written last and carries its own checksum, so that whoever opens the same store after a kill
-9 finds every slot either whole or absent. A page's checksum is verified each time it is read. A store that fails
(OSError) costs the block that it failed on, nothing else.

    record: hash 32 | page xxh3 8 | last use 8 | reserved 8 | xxh3 of the 56 bytes before 8
"""

from __future__ import annotations

import logging
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import xxhash

from baton.kv.memory import copying
from baton.kv.pages.lru import PageOrder
from baton.kv.pages.supply import EvictionOrder
from baton.kv.pages.worth import WorthOrder

log = logging.getLogger("baton.kv")

_RECORD = struct.Struct("<32sQQQQ")
RECORD_BYTES = _RECORD.size
_SIGNED = RECORD_BYTES - 8
_BLANK = bytes(RECORD_BYTES)


class Store(Protocol):
    """Says where slots lie. Any method but ``view`` may raise OSError, and may take as long as a device does."""

    slots: int

    def view(self, slot: int) -> memoryview:
        """Returns memory that a page is copied to before ``flush`` and from after ``fetch``, until the next
        of either.
        """

    def fetch(self, slot: int) -> None:
        """Brings the page of ``slot`` to its ``view``."""

    def flush(self, slot: int) -> None:
        """Stores what lies in the ``view`` of ``slot``."""

    def record(self, slot: int, data: bytes) -> None:
        """Writes the 64 bytes of a slot's record."""

    def records(self) -> bytes:
        """Returns all records, ``slots`` x 64 bytes."""


Touching = Callable[[], AbstractContextManager[object]]
"""Returns a context in which the caller's page may be touched for one copy; what it raises ends the call."""


Eviction = Literal["worth", "lru"]


class Slab:
    """Keeps blocks in a store, of which it takes over what is valid. ``failed`` counts calls of the store
    that failed.

    With ``eviction`` "worth" the block that is worth least goes first, as it learns from their uses (``worth.py``),
    which a restart forgets; with "lru" the one that was unused longest.
    """

    def __init__(self, store: Store, eviction: Eviction = "worth") -> None:
        self.stored = self.loaded = self.evicted = self.damaged = self.failed = 0
        self.store = store
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # hash -> slot, least recently used first
        self._sums: dict[int, int] = {}
        self._block_of: list[bytes | None] = [None] * store.slots
        self._order: EvictionOrder = PageOrder(store.slots)
        if eviction == "worth":
            self._order = WorthOrder(store.slots, self._block_of)
        self._tick = 0
        self._recover()
        used = set(self._slots.values())
        self._free = [slot for slot in range(store.slots - 1, -1, -1) if slot not in used]

    @property
    def capacity(self) -> int:
        """Returns the number of slots, used or not."""
        return self.store.slots

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block: bytes) -> bool:
        return block in self._slots

    def hashes(self) -> tuple[bytes, ...]:
        """Returns the blocks that are here, least recently used first."""
        return tuple(self._slots)

    def touch(self, block: bytes) -> None:
        """Makes a block the most recently used one; unknown blocks are no error."""
        slot = self._slots.get(block)
        if slot is not None:
            self._slots.move_to_end(block)
            self._order.remove([slot])
            self._order.add([slot])
            self._record(slot, block)

    def put(self, block: bytes, page: memoryview, touching: Touching = nullcontext) -> bytes | None:
        """Stores a copy of ``page``, if it can. Returns the hash that had to go for it, if one had to.

        A block that is here already is only touched.
        """
        if block in self._slots:
            self.touch(block)
            return None
        gone = None if self._free else self._evict()
        slot = self._free[-1]
        with touching():
            [checksum] = copying.copy([self.store.view(slot)], [page])
        try:
            self.store.flush(slot)
        except OSError as error:
            self._failed("kept", error)
            return gone
        self._free.pop()
        self._sums[slot] = checksum
        self._order.handed_out(1)
        self._join(block, slot)
        self._record(slot, block)
        self.stored += 1
        return gone

    def load(self, block: bytes, into: memoryview, touching: Touching = nullcontext) -> bool:
        """Copies the page of ``block`` to ``into`` and verifies the copy.

        Returns False where it is absent, can't be read or was damaged; in these two cases it is dropped.
        """
        slot = self._slots.get(block)
        if slot is None:
            return False
        try:
            self.store.fetch(slot)
        except OSError as error:
            self._failed("read", error)
            self.drop(block)
            return False
        with touching():
            checksums = copying.copy([into], [self.store.view(slot)])
        if checksums != [self._sums[slot]]:
            self.damaged += 1
            self.drop(block)
            return False
        self.loaded += 1
        return True

    def drop(self, block: bytes) -> None:
        """Forgets a block; unknown blocks are no error."""
        slot = self._slots.pop(block, None)
        if slot is not None:
            self._order.remove([slot])
            self._blank(slot)

    def check(self) -> None:
        """Asserts that each slot holds one block or none."""
        used = list(self._slots.values())
        assert len(set(used)) == len(used), "two blocks share a slot"
        assert sorted([*used, *self._free]) == list(range(self.capacity)), "a slot is lost, or both free and used"
        assert self._sums.keys() == set(used), "checksums and slots differ"
        assert set(self._order) == set(used), "what may go and what is here differ"
        assert all(self._block_of[slot] == block for block, slot in self._slots.items()), (
            "a slot names another block"
        )

    def _evict(self) -> bytes:
        [slot] = self._order.take(1)
        block = self._block_of[slot]
        assert block is not None, "only slots with a block are in the order"
        del self._slots[block]
        self._blank(slot)
        self.evicted += 1
        return block

    def _join(self, block: bytes, slot: int) -> None:
        self._slots[block], self._block_of[slot] = slot, block
        self._order.add([slot])

    def _blank(self, slot: int) -> None:
        """First the record: a slot that is being written must not pass for its old block."""
        self._write(slot, _BLANK)
        self._sums.pop(slot, None)
        self._block_of[slot] = None
        self._free.append(slot)

    def _record(self, slot: int, block: bytes) -> None:
        self._tick += 1
        signed = _RECORD.pack(block, self._sums[slot], self._tick, 0, 0)[:_SIGNED]
        self._write(slot, signed + struct.pack("<Q", xxhash.xxh3_64_intdigest(signed)))

    def _write(self, slot: int, record: bytes) -> None:
        """One that can't be written is wrong or missing after a restart: then the page's checksum tells."""
        try:
            self.store.record(slot, record)
        except OSError as error:
            self._failed("recorded", error)

    def _failed(self, what: str, error: OSError) -> None:
        """Count it; the log hears of the 1st, 2nd, 4th, 8th …, because a broken disk fails on every block."""
        self.failed += 1
        if self.failed & (self.failed - 1) == 0:
            log.warning(
                "a lower tier fails (%d times so far): a block could not be %s: %s", self.failed, what, error
            )

    def _recover(self) -> None:
        """Take over the records that are whole, in their order of use; blank the others."""
        found, records = [], self.store.records()
        for slot in range(self.store.slots):
            raw = records[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]
            if raw == _BLANK:
                continue
            block, checksum, used, _, signature = _RECORD.unpack(raw)
            if xxhash.xxh3_64_intdigest(raw[:_SIGNED]) == signature:
                found.append((used, slot, block, checksum))
            else:
                self.damaged += 1
                self._write(slot, _BLANK)
        for used, slot, block, checksum in _youngest(found):
            self._sums[slot], self._tick = checksum, used
            self._join(block, slot)


def _youngest(found: Iterable[tuple[int, int, bytes, int]]) -> list[tuple[int, int, bytes, int]]:
    """By use, oldest first; of two records of one block (never written by us) the younger."""
    by_block = {record[2]: record for record in sorted(found)}
    return sorted(by_block.values())
