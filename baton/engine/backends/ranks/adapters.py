"""Holds adapters on every rank: the lead passes each by shared memory, a rank keeps the part for its own rows.

Knows nothing of files or steps. Ranks identify adapters by numbers, which the lead assigns to items. Matrices that
are cut are copied; the others, those beside experts among them, stay in the memory that the ranks of a host share.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import Array, PackedAdapter, PackedPart
from baton.engine.backends.native.adapters import NativeAdapter
from baton.engine.backends.ranks.notes import AdapterNote, mapped, written
from baton.engine.backends.torch.adapters import require_held
from baton.engine.plan import SequenceStep
from baton.engine.program.rank_program import RankProgram, Rows
from baton.kernels.lora.structs import PANEL, pack_b, panelled
from baton.protos.errors import AdaptersFull

ALIGN = 64  # bytes, to a multiple of which each matrix is aligned
Tell = Callable[[int, int], None]  # (descriptor of a note, its bytes): returns when every rank has taken it


class OwnAdapters:
    """Holds one rank's share of adapters, at most ``most``. ``table`` is the address of an array of them, by
    number, for the native step.
    """

    def __init__(self, own: RankProgram, most: int) -> None:
        self._own, self._sites = own, max(own.sites, default=-1) + 1
        self._held: dict[int, NativeAdapter] = {}
        self._table = (ctypes.c_void_p * most)()
        self.table = ctypes.addressof(self._table)

    def hold(self, number: int, packed: PackedAdapter) -> None:
        """Keeps this rank's share of ``packed``, whose memory must stay valid."""
        share = own_share(self._own, packed)
        found = NativeAdapter(share.whole, self._sites, share.cut)
        self._held[number], self._table[number] = found, found.address

    def drop(self, number: int) -> None:
        """Removes this rank's share of adapter ``number``."""
        self._table[number] = None
        self._held.pop(number, None)

    def take(self, note: AdapterNote, memory: memoryview) -> None:
        """Applies ``note``, whose matrices are in ``memory``."""
        if note.parts:
            self.hold(note.number, PackedAdapter(note.parts, memory))
        else:
            self.drop(note.number)


class RankAdapters:
    """Implements ``AdapterHost`` for the lead rank. ``tell`` sends a note to all other ranks."""

    def __init__(self, base: AdapterBase, own: OwnAdapters, most: int, tell: Tell) -> None:
        self.base = base
        self._own, self._tell = own, tell
        self._numbers: dict[str, int] = {}
        self._free = list(range(most))

    def hold(self, adapter: str, packed: PackedAdapter) -> None:
        """Applies ``packed`` to sequences that name ``adapter``. Raises RankLost and AdaptersFull."""
        if adapter not in self._numbers:
            if not self._free:
                raise AdaptersFull(
                    f"{adapter}: no number is free for it; unload one", "adapters", retry_after_s=1.0
                )
            self._numbers[adapter] = self._free.pop()
        number = self._numbers[adapter]
        with written(AdapterNote(number, packed.parts), packed.memory) as (fd, size):
            self._own.hold(number, PackedAdapter(packed.parts, mapped(os.dup(fd), size)))
            self._tell(fd, size)

    def drop(self, adapter: str) -> None:
        """Removes an adapter that no sequence names any more. Raises RankLost."""
        number = self._numbers.pop(adapter, None)
        if number is not None:
            self._own.drop(number)
            with written(AdapterNote(number)) as (fd, size):
                self._tell(fd, size)
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
