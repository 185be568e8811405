"""Holds adapters on every rank: those of a host share the memory of all matrices, of which each reads its part.

Knows nothing of files or steps. Ranks identify adapters by numbers, which the lead assigns to items. An adapter
comes in pieces, between which steps may run, and can be named once all have the last one. Ranks of the lead's host
are told where a piece's parts lie; other hosts, which don't share its memory, get the matrices of each piece.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.host import AdapterHost
from baton.engine.adapters.packed import PackedAdapter
from baton.engine.adapters.part_table import PART_ROW, Rows, moved, rows_of
from baton.engine.backends.adapter_matrices import require_held
from baton.engine.backends.native.adapter_structs import PIECE_PARTS, AdapterStructs, address_of
from baton.engine.backends.ranks.notes import AdapterNote, put, written
from baton.engine.backends.ranks.own_parts import OwnParts
from baton.engine.plan import SequenceStep
from baton.engine.program.rank_program import RankProgram
from baton.protos.errors import AdaptersFull

COPIED_BYTES = 1 << 20  # of a piece's matrices where ranks' outputs begin inside a panel, because these are copied
SENT_BYTES = 1 << 18  # of a piece's matrices where they are sent to other hosts between two steps
Tell = Callable[[int, int], None]  # (descriptor of a note, its bytes): returns when every rank has taken it


class OwnAdapters:
    """Holds one rank's share of adapters, at most ``most``. ``table`` is the address of an array of them, by
    number, for the native step.
    """

    def __init__(self, own: RankProgram, most: int) -> None:
        self._parts = OwnParts(own)
        self._held: dict[int, _Share] = {}
        self._table = (ctypes.c_void_p * most)()
        self.table = ctypes.addressof(self._table)

    def take(self, note: AdapterNote, memory: memoryview) -> None:
        """Applies ``note``, which lies in ``memory``; the adapter is there with the last of its notes."""
        if note.count:
            self.add(note.number, np.frombuffer(memory, PART_ROW, note.count, note.at), memory, note.last)
        else:
            self.drop(note.number)

    def add(self, number: int, rows: Rows, memory: memoryview, last: bool) -> None:
        """Adds parts, whose matrices are in ``memory``, to adapter ``number``, which the last of them complete."""
        share = self._held.setdefault(number, _Share())
        share.add(self._parts, rows, memory)
        if last:
            self._table[number] = share.placed(self._parts.sites)

    def drop(self, number: int) -> None:
        """Removes adapter ``number`` and frees its memory."""
        self._table[number] = None
        self._held.pop(number, None)


class _Share:
    """One rank's share of one adapter, which comes in pieces; it keeps the memory of their matrices."""

    def __init__(self) -> None:
        self._structs, self._kept = AdapterStructs(), list[memoryview]()

    def add(self, parts: OwnParts, rows: Rows, memory: memoryview) -> None:
        own = parts.of(rows, memory)
        if len(own.rows):
            self._kept += [memory] if own.made is None else [memory, own.made]
            deque(self._structs.add(own.rows, address_of(memory)), maxlen=0)

    def placed(self, sites: int) -> int:
        """Returns the address of the structs of all sites."""
        self._structs.join()
        self._structs.place(address_of(self._structs.parts), sites)
        return address_of(self._structs.sites)


class RankAdapters(AdapterHost):
    """Implements ``AdapterHost`` for the lead rank. ``tell`` sends a note to all other ranks; ``shares`` says that
    all of them are on this host, and ``copies`` that one of them copies some of the matrices that they share.
    """

    def __init__(
        self,
        base: AdapterBase,
        own: OwnAdapters,
        most: int,
        tell: Tell,
        shares: bool = True,
        copies: bool = False,
    ) -> None:
        self.base = base
        self._own, self._tell, self._shares = own, tell, shares
        self._piece = COPIED_BYTES if copies else sys.maxsize
        self._numbers: dict[str, int] = {}
        self._left: set[str] = set()  # that ranks may have pieces of, and nobody may name
        self._free = list(range(most))

    def holding(self, adapter: str, packed: PackedAdapter) -> Iterator[None]:
        """Applies ``packed`` to sequences that name ``adapter``, a piece at a time. Raises RankLost, AdaptersFull,
        and OSError without memory or descriptors to spare; what ranks have of it then goes before the next one
        comes.
        """
        for earlier in tuple(self._left):
            self._remove(earlier)
        if not self._free:
            raise AdaptersFull(f"{adapter}: no number is free for it; unload one", "adapters", retry_after_s=1.0)
        number = self._numbers[adapter] = self._free.pop()
        self._left.add(adapter)
        told = self._told_places(number, packed) if self._shares else self._sent(number, packed)
        for piece in told:
            self._own.add(number, piece.rows, packed.memory, piece.last)
            yield
        self._left.discard(adapter)

    def _told_places(self, number: int, packed: PackedAdapter) -> Iterator[AdapterPiece]:
        """Tells the ranks of this host where each piece of ``packed`` lies, and yields the piece."""
        rows, size = rows_of(packed.parts), len(packed.memory)
        at, end = size, size + rows.nbytes
        with _shared(packed, rows) as file:
            for piece in pieces_of(rows, size, min(self._piece, size)):
                note = AdapterNote(number, at, len(piece.rows), piece.last)
                self._tell(file, put(note, file, end))
                at += piece.rows.nbytes
                yield piece

    def _sent(self, number: int, packed: PackedAdapter) -> Iterator[AdapterPiece]:
        """Sends all ranks the matrices of each piece of ``packed``, and yields the piece."""
        for piece in pieces_of(rows_of(packed.parts), len(packed.memory), SENT_BYTES):
            matrices = packed.memory[piece.begin : piece.end]
            note = AdapterNote(number, len(matrices), len(piece.rows), piece.last)
            with written(note, matrices, moved(piece.rows, -piece.begin).tobytes()) as told:
                self._tell(*told)
            yield piece

    def drop(self, adapter: str) -> None:
        """Removes an adapter that no sequence names any more; without a descriptor to spare for it, before the next
        one is held. Raises RankLost.
        """
        if adapter not in self._numbers:
            return
        try:
            self._remove(adapter)
        except OSError:
            self._left.add(adapter)

    def _remove(self, adapter: str) -> None:
        """Removes an adapter from all ranks. Raises RankLost, and OSError with nothing changed."""
        number = self._numbers[adapter]
        with written(AdapterNote(number)) as told:
            self._tell(*told)
        self._own.drop(number)  # at last, because who unmaps memory last frees it, which is left to another process
        del self._numbers[adapter]
        self._left.discard(adapter)
        self._free.append(number)

    def numbers(self, items: Sequence[SequenceStep]) -> list[int] | None:
        """Returns each item's adapter number, -1 for none; None if no item has an adapter. Raises
        AdapterNotLoaded.
        """
        for item in items:
            require_held(item.adapter, self._numbers)
        if not any(item.adapter for item in items):
            return None
        return [self._numbers[item.adapter] if item.adapter else -1 for item in items]


class AdapterPiece(NamedTuple):
    """Some of an adapter's parts, whose matrices lie at bytes ``begin`` … ``end`` - 1 of its memory."""

    rows: Rows
    begin: int
    end: int
    last: bool


def pieces_of(rows: Rows, size: int, most: int) -> Iterator[AdapterPiece]:
    """Yields an adapter's parts by pieces: at most PIECE_PARTS parts and ``most`` bytes, or a single part. Its
    memory has ``size`` bytes of matrices, in the order of ``rows``.
    """
    starts, done = np.append(rows["a"], size), 0
    assert (np.diff(starts) >= 0).all(), "matrices lie in the order of sites"
    while done < len(rows):
        begin = int(starts[done])
        fit = int(np.searchsorted(starts, begin + most, "right")) - 1
        end = max(done + 1, min(fit, done + PIECE_PARTS))
        yield AdapterPiece(rows[done:end], begin, int(starts[end]), end == len(rows))
        done = end


@contextmanager
def _shared(packed: PackedAdapter, rows: Rows) -> Iterator[int]:
    """Yields the memory file of ``packed``, or a new one like it: its matrices, and ``rows`` behind them."""
    if packed.file >= 0:
        yield packed.file
        return
    file = os.memfd_create("baton-adapter", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as copy:
            copy.writelines((packed.memory, rows.tobytes()))
        yield file
    finally:
        os.close(file)
