"""Caches pages in the fixed slots of a store, memory or files: checksummed, the least valuable evicted first.

Knows nothing of files, threads or who computes the pages. One thread writes and reads; membership may be queried
from any. A slot's record is written last and has its own checksum, so that after a kill -9 every slot of the store
is either whole or absent. A page's checksum is verified each time it is read. If a store
fails (OSError), only the block concerned is lost.

    record: hash 32 | page xxh3 8 | last use 8 | reserved 8 | xxh3 of the 56 bytes before 8
"""

from __future__ import annotations

import logging
import struct
from collections import OrderedDict, deque
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
_SIGNED = RECORD_BYTES - 8  # bytes of a record that its checksum, the last 8, covers
_BLANK = bytes(RECORD_BYTES)


class Store(Protocol):
    """Memory or files with ``slots`` slots of a page and a 64-byte record each. Any method but ``view`` may raise
    OSError, and may take as long as a device does.
    """

    slots: int

    def view(self, slot: int) -> memoryview:
        """Returns the memory in which a page is put before ``flush`` and found after ``fetch``; valid until the
        next of either.
        """

    def fetch(self, slot: int) -> None:
        """Reads the page of ``slot`` into its ``view``."""

    def flush(self, slot: int) -> None:
        """Writes the ``view`` of ``slot`` as its page."""

    def record(self, slot: int, data: bytes) -> None:
        """Writes the 64-byte record of ``slot``."""

    def records(self) -> bytes:
        """Returns all records, ``slots`` x 64 bytes."""


Touching = Callable[[], AbstractContextManager[object]]
"""Returns a context in which the caller's page may be accessed for one copy; if it raises, the call ends."""


Eviction = Literal["worth", "lru"]


class Slab:
    """Caches blocks in a store, including the valid ones that it already contains. ``failed`` counts failed calls
    of the store.

    With ``eviction`` "worth" the least valuable block is evicted first, as learned from earlier uses
    (``worth.py``), which a restart forgets; with "lru" the least recently used one.
    """

    def __init__(self, store: Store, eviction: Eviction = "worth") -> None:
        self.stored = self.loaded = self.evicted = self.damaged = self.failed = 0
        self.store = store
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # hash -> slot, least recently used first
        self._sums: dict[int, int] = {}
        self._block_of: list[bytes | None] = [None] * store.slots
        self._gone: deque[bytes] = deque()  # blocks that left since ``drain_gone``
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
        """Returns the hashes of the cached blocks, the least recently used first."""
        return tuple(self._slots)

    def touch(self, block: bytes) -> None:
        """Makes ``block`` the most recently used one, so that it is evicted last; does nothing if it isn't
        cached.
        """
        slot = self._slots.get(block)
        if slot is not None:
            self._slots.move_to_end(block)
            self._order.remove([slot])
            self._order.add([slot])
            self._record(slot, block)

    def put(self, block: bytes, page: memoryview, touching: Touching = nullcontext) -> bytes | None:
        """Caches a copy of ``page`` as ``block``; returns the hash of the block evicted for it, or None.

        A block that is cached already is only touched, one that the store can't write is not cached.
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
        """Copies the page of ``block`` to ``into`` and verifies the copy; returns whether it succeeded.

        A block that can't be read, or is damaged, is dropped.
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
        """Removes a block; does nothing if it isn't cached."""
        slot = self._slots.pop(block, None)
        if slot is not None:
            self._order.discard([slot])
            self._blank(slot)
            self._gone.append(block)

    def drain_gone(self) -> list[bytes]:
        """Returns the blocks that were evicted or dropped since the last call, some of which may be back.

        Any thread may call it.
        """
        return [self._gone.popleft() for _ in range(len(self._gone))]

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
        self._gone.append(block)
        self.evicted += 1
        return block

    def _join(self, block: bytes, slot: int) -> None:
        self._slots[block], self._block_of[slot] = slot, block
        self._order.add([slot])

    def _blank(self, slot: int) -> None:
        """Frees a slot, its record first, so that a slot being written can't be taken for its old block."""
        self._write(slot, _BLANK)
        self._sums.pop(slot, None)
        self._block_of[slot] = None
        self._free.append(slot)

    def _record(self, slot: int, block: bytes) -> None:
        self._tick += 1
        signed = _RECORD.pack(block, self._sums[slot], self._tick, 0, 0)[:_SIGNED]
        self._write(slot, signed + struct.pack("<Q", xxhash.xxh3_64_intdigest(signed)))

    def _write(self, slot: int, record: bytes) -> None:
        """Writes a record; a failed one is wrong or missing after a restart, which the page's checksum reveals."""
        try:
            self.store.record(slot, record)
        except OSError as error:
            self._failed("recorded", error)

    def _failed(self, what: str, error: OSError) -> None:
        """Counts a failure and logs the 1st, 2nd, 4th, 8th …, because a broken disk fails on every block."""
        self.failed += 1
        if self.failed & (self.failed - 1) == 0:
            log.warning(
                "a lower tier fails (%d times so far): a block could not be %s: %s", self.failed, what, error
            )

    def _recover(self) -> None:
        """Takes over the store's valid records, in their order of use; blanks the others."""
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
    """Returns the records by use, oldest first; of two of one block (never written by us) only the younger."""
    by_block = {record[2]: record for record in sorted(found)}
    return sorted(by_block.values())
