"""Holds adapters on every rank: the lead passes each by shared memory, a rank keeps the part for its own rows.

Knows nothing of files or steps. Ranks identify adapters by numbers, which the lead assigns to items. An adapter
comes in pieces, between which steps may run, and can be named once all have the last one. Matrices that are cut
are copied; the others, those beside experts among them, stay in the memory that the ranks of a host share.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import Array, PackedAdapter, PackedPart
from baton.engine.adapters.part_table import PartTable, in_order, moved, rows_of
from baton.engine.backends.native.adapter_structs import AdapterStructs, address_of
from baton.engine.backends.ranks.notes import AdapterNote, mapped, written
from baton.engine.backends.torch.adapters import require_held
from baton.engine.plan import AdapterHost, SequenceStep
from baton.engine.program.rank_program import RankProgram, Rows
from baton.kernels.lora.structs import PANEL, pack_b, panelled
from baton.protos.errors import AdaptersFull

ALIGN = 64  # bytes, to a multiple of which each matrix is aligned
NOTE_BYTES, NOTE_PARTS = 1 << 18, 128  # of one adapter, passed between two steps, in about a millisecond
Tell = Callable[[int, int], None]  # (descriptor of a note, its bytes): returns when every rank has taken it


class OwnAdapters:
    """Holds one rank's share of adapters, at most ``most``. ``table`` is the address of an array of them, by
    number, for the native step.
    """

    def __init__(self, own: RankProgram, most: int) -> None:
        self._own, self._sites = own, max(own.sites, default=-1) + 1
        self._held: dict[int, _Share] = {}
        self._table = (ctypes.c_void_p * most)()
        self.table = ctypes.addressof(self._table)

    def take(self, note: AdapterNote, memory: memoryview) -> None:
        """Applies ``note``, whose matrices are in ``memory``; the adapter is there with the last of its notes."""
        if not note.parts:
            self._drop(note.number)
            return
        share = self._held.setdefault(note.number, _Share())
        share.add(own_share(self._own, PackedAdapter(note.parts, memory)))
        if note.last:
            self._table[note.number] = share.placed(self._sites)

    def _drop(self, number: int) -> None:
        self._table[number] = None
        self._held.pop(number, None)


class _Share:
    """One rank's share of one adapter, which comes in pieces; it keeps the memory of their matrices."""

    def __init__(self) -> None:
        self._structs, self._kept = AdapterStructs(), list[memoryview]()

    def add(self, piece: OwnShare) -> None:
        placed = []
        for packed in piece:
            if packed.parts:
                self._kept.append(packed.memory)
                placed.append(moved(rows_of(packed.parts), address_of(packed.memory)))
        if placed:
            deque(self._structs.add(in_order(np.concatenate(placed)), 0), maxlen=0)

    def placed(self, sites: int) -> int:
        """Returns the address of the structs of all sites."""
        self._structs.join()
        self._structs.place(address_of(self._structs.parts), sites)
        return address_of(self._structs.sites)


class RankAdapters(AdapterHost):
    """Implements ``AdapterHost`` for the lead rank. ``tell`` sends a note to all other ranks."""

    def __init__(self, base: AdapterBase, own: OwnAdapters, most: int, tell: Tell) -> None:
        self.base = base
        self._own, self._tell = own, tell
        self._numbers: dict[str, int] = {}
        self._free = list(range(most))

    def holding(self, adapter: str, packed: PackedAdapter) -> Iterator[None]:
        """Applies ``packed`` to sequences that name ``adapter``, a note at a time. Raises RankLost and
        AdaptersFull.
        """
        if adapter in self._numbers:
            self.drop(adapter)
        if not self._free:
            raise AdaptersFull(f"{adapter}: no number is free for it; unload one", "adapters", retry_after_s=1.0)
        number = self._numbers[adapter] = self._free.pop()
        for note, matrices in notes_of(number, packed):
            self._apply(note, matrices)
            yield

    def _apply(self, note: AdapterNote, matrices: memoryview = memoryview(b"")) -> None:
        with written(note, matrices) as (fd, size):
            self._own.take(note, mapped(os.dup(fd), size))
            self._tell(fd, size)

    def drop(self, adapter: str) -> None:
        """Removes an adapter that no sequence names any more. Raises RankLost."""
        number = self._numbers.pop(adapter, None)
        if number is not None:
            self._apply(AdapterNote(number))
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


def notes_of(number: int, packed: PackedAdapter) -> Iterator[tuple[AdapterNote, memoryview]]:
    """Yields the notes by which ranks take adapter ``number``, each with its matrices: at most NOTE_PARTS parts and
    NOTE_BYTES, or a single part.
    """
    rows = rows_of(packed.parts)
    rows = rows[np.argsort(rows["a"], kind="stable")]
    starts, done = np.append(rows["a"], len(packed.memory)), 0
    while done < len(rows):
        begin = int(starts[done])
        fit = int(np.searchsorted(starts, begin + NOTE_BYTES, "right")) - 1
        end = max(done + 1, min(fit, done + NOTE_PARTS))
        parts = tuple(PartTable(moved(rows[done:end], -begin)))
        yield AdapterNote(number, parts, end == len(rows)), packed.memory[begin : int(starts[end])]
        done = end


class OwnShare(NamedTuple):
    """The parts of an adapter that apply to a rank's part of the model."""

    whole: PackedAdapter  # those with all their outputs, in the adapter's memory
    cut: PackedAdapter  # those of the rank's own outputs alone, numbered as there, in a memory of their own


def own_share(own: RankProgram, packed: PackedAdapter) -> OwnShare:
    """Returns the rank's share of an adapter; beside experts that is each part whose expert is or may come here."""
    here = [part for part in packed.parts if part.site.number in own.sites]
    room, whole, cut = _Room(), list[PackedPart](), list[PackedPart]()
    for part in here:
        rows = None if part.site.looked_up else own.rows.get(own.sites[part.site.number])
        if rows is None:
            whole.append(part)
        elif part.site.number <= own.head_site:
            cut += _cut(packed, part, rows, room)
        elif own.rank.spare or rows[0][0] <= part.site.first < rows[0][1]:
            whole.append(part)
    return OwnShare(PackedAdapter(tuple(whole), packed.memory), PackedAdapter(tuple(cut), room.memory()))


class _Room:
    """Lays out arrays one after the other."""

    def __init__(self) -> None:
        self._pieces: list[Array] = []
        self._end = 0

    def put(self, values: Array) -> int:
        """Adds a copy of ``values`` and returns the offset in bytes at which it will lie."""
        at, size = self._end, -(-values.nbytes // ALIGN) * ALIGN
        self._pieces.append(np.zeros(size, np.uint8))
        self._pieces[-1][: values.nbytes] = np.ascontiguousarray(values).view(np.uint8).ravel()
        self._end += size
        return at

    def memory(self) -> memoryview:
        """Returns all of it, page-aligned."""
        found = mmap.mmap(-1, max(1, self._end))
        at = 0
        for piece in self._pieces:
            found[at : at + len(piece)] = piece.tobytes()
            at += len(piece)
        return memoryview(found)


def _cut(packed: PackedAdapter, part: PackedPart, rows: Rows, room: _Room) -> Iterator[PackedPart]:
    """Yields the pieces of a part for each of ``rows``; they share matrix A."""
    site = part.site
    a, b = room.put(packed.first(part)), packed.plain_second(part)
    local = 0
    for begin, end in rows:
        low, high = max(begin, site.first), min(end, site.first + site.outputs)
        if low < high:
            own = b[low - site.first : high - site.first]
            panels = np.empty((panelled(len(own)) // PANEL, part.rank, PANEL), part.dtype)
            pack_b(own, panels)
            at = msgspec.structs.replace(site, first=local + low - begin, outputs=high - low)
            yield msgspec.structs.replace(part, site=at, a=a, b=room.put(panels))
        local += end - begin
