"""Holds adapters on every rank: the lead gives each out by shared memory, a rank keeps what stands beside own rows.

Knows nothing of files or steps. A rank knows an adapter by a number; the lead says by these which items have which.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import Array, PackedAdapter, PackedPart
from baton.engine.backends.native.adapters import NativeAdapter
from baton.engine.backends.torch.adapters import require_held
from baton.engine.plan import SequenceStep
from baton.engine.program.rank_program import RankProgram, Rows
from baton.kernels.lora.structs import PANEL, pack_b, panelled
from baton.protos.errors import AdaptersFull

ALIGN = 64  # bytes, at which each matrix begins
LENGTH = 8  # bytes behind all others: how long the note is
Tell = Callable[[int, int], None]  # (descriptor of a note, its bytes): returns when every rank has taken it


class AdapterNote(msgspec.Struct, frozen=True, array_like=True):
    """Tells ranks what adapter ``number`` is from now on: matrices that lie before the note; none: it is gone."""

    number: int
    parts: tuple[PackedPart, ...] = ()


class OwnAdapters:
    """Holds one rank's share of every adapter. ``table`` is where the native step finds them, by number."""

    def __init__(self, own: RankProgram, most: int) -> None:
        self._own = own
        self._held: dict[int, NativeAdapter] = {}
        self._table = (ctypes.c_void_p * most)()
        self.table = ctypes.addressof(self._table)

    def hold(self, number: int, packed: PackedAdapter) -> None:
        """Keeps this rank's share of ``packed``, whose memory must stay."""
        found = NativeAdapter(own_share(self._own, packed), self._own.head_site + 1)
        self._held[number], self._table[number] = found, found.address

    def drop(self, number: int) -> None:
        """Forgets the share of adapter ``number`` that this rank holds."""
        self._table[number] = None
        self._held.pop(number, None)

    def take(self, fd: int, size: int) -> None:
        """Acts on the note at descriptor ``fd``, which it closes."""
        memory = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(fd)
        end = size - LENGTH
        note = msgspec.json.decode(memory[end - int.from_bytes(memory[end:], "little") : end], type=AdapterNote)
        if note.parts:
            self.hold(note.number, PackedAdapter(note.parts, memoryview(memory)))
        else:
            self.drop(note.number)


class RankAdapters:
    """Implements ``AdapterHost`` for a lead. ``tell`` gives a note to all other ranks."""

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
        self._own.hold(number, packed)
        self._note(AdapterNote(number, packed.parts), packed.memory)

    def drop(self, adapter: str) -> None:
        """Forgets an adapter that no sequence names any more. Raises RankLost."""
        number = self._numbers.pop(adapter, None)
        if number is not None:
            self._own.drop(number)
            self._note(AdapterNote(number), memoryview(b""))
            self._free.append(number)

    def numbers(self, items: Sequence[SequenceStep]) -> list[int] | None:
        """Returns each item's adapter, -1 for none, or None where no item has one. Raises AdapterNotLoaded."""
        for item in items:
            require_held(item.adapter, self._numbers)
        if not any(item.adapter for item in items):
            return None
        return [self._numbers[item.adapter] if item.adapter else -1 for item in items]

    def _note(self, note: AdapterNote, matrices: memoryview) -> None:
        said = msgspec.json.encode(note)
        fd = os.memfd_create("baton-adapter", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.writelines((matrices, said, len(said).to_bytes(LENGTH, "little")))
            self._tell(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)


def own_share(own: RankProgram, packed: PackedAdapter) -> PackedAdapter:
    """Returns what of an adapter stands beside the rank's part of the model, outputs counted as they lie there."""
    here = [part for part in packed.parts if part.site.number in own.sites]
    if not own.rows:
        return PackedAdapter(tuple(here), packed.memory)
    room = _Room()
    parts = [found for part in here for found in _cut(packed, part, _rows_beside(own, part), room)]
    return PackedAdapter(tuple(parts), room.memory())


def _rows_beside(own: RankProgram, part: PackedPart) -> Rows | None:
    """The ranges of rows that the rank has of the weight at a part's site; None where it has all outputs."""
    return None if part.site.looked_up else own.rows.get(own.sites[part.site.number])


class _Room:
    """Lays arrays one behind the other."""

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
        """All of it, beginning at a page."""
        found = mmap.mmap(-1, max(1, self._end))
        at = 0
        for piece in self._pieces:
            found[at : at + len(piece)] = piece.tobytes()
            at += len(piece)
        return memoryview(found)


def _cut(packed: PackedAdapter, part: PackedPart, rows: Rows | None, room: _Room) -> Iterator[PackedPart]:
    """The pieces of a part beside each of ``rows``; they share the first matrix."""
    site = part.site
    a, b = room.put(packed.first(part)), packed.plain_second(part)
    local = 0
    for begin, end in rows or ((0, site.first + site.outputs),):
        low, high = max(begin, site.first), min(end, site.first + site.outputs)
        if low < high:
            own = b[low - site.first : high - site.first]
            panels = np.empty((panelled(len(own)) // PANEL, part.rank, PANEL), part.dtype)
            pack_b(own, panels)
            at = msgspec.structs.replace(site, first=local + low - begin, outputs=high - low)
            yield msgspec.structs.replace(part, site=at, a=a, b=room.put(panels))
        local += end - begin
