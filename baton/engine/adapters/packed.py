"""Packs an adapter's matrices into one buffer, in the form that every backend reads. Torch-free.

Knows nothing of files. Matrices A are stored as (rank, inputs), those of an embedding as (tokens, rank); matrices B
in panels (kernels/lora/lora.h). Each begins at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.adapters.matrices import MatrixPair
from baton.engine.program.sites import Site
from baton.kernels.lora.structs import PANEL, pack_b, panelled, unpack_b

Array = NDArray[np.generic]


class PackedPart(msgspec.Struct, frozen=True, array_like=True):
    """The place of one module's packed matrices in an adapter's memory."""

    site: Site
    rank: int
    scale: float  # factor of B times A, the site's gain included
    narrow: bool  # stored as bf16, else as float32
    a: int  # offset of matrix A in bytes
    b: int  # offset of matrix B in bytes

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Returns the numpy dtype of the stored matrices: float32, or uint16 for the bits of bf16."""
        return np.dtype(np.uint16 if self.narrow else np.float32)


class PackedAdapter(msgspec.Struct, frozen=True):
    """An adapter that can be applied: its parts, and the buffer with their matrices.

    If ``file`` isn't -1 it is the descriptor of a memory file that begins with the matrices, behind which the rows
    of the parts lie (``part_table.py``); it is open as long as ``memory`` is there.
    """

    parts: Sequence[PackedPart]
    memory: memoryview
    file: int = -1

    def first(self, part: PackedPart) -> Array:
        """Returns a view of matrix A of ``part``, (rank, inputs), or (tokens, rank) of an embedding."""
        shape = (part.site.inputs, part.rank) if part.site.looked_up else (part.rank, part.site.inputs)
        return self._view(part, part.a, shape)

    def second(self, part: PackedPart) -> Array:
        """Returns a view of the packed matrix B of ``part``, (ceil(outputs / 64), rank, 64)."""
        return self._view(part, part.b, (panelled(part.site.outputs) // PANEL, part.rank, PANEL))

    def plain_second(self, part: PackedPart) -> Array:
        """Returns matrix B of ``part`` unpacked, (outputs, rank)."""
        return unpack_b(self.second(part), part.site.outputs)

    def _view(self, part: PackedPart, at: int, shape: tuple[int, ...]) -> Array:
        return np.frombuffer(self.memory, part.dtype, int(np.prod(shape)), at).reshape(shape)


def laid_out(pairs: Sequence[MatrixPair]) -> tuple[PackedPart, ...]:
    """Returns the place of each pair's matrices in one buffer, whose size is the sum of the pairs' ``bytes``.

    The parts are in the pairs' order, and their matrices lie in the order of sites, which is the steps'. A pair of
    all experts has a part of each.
    """
    placed = [(site, pair) for pair in pairs for site in pair.sites]
    parts, at = dict[int, PackedPart](), 0
    for index in sorted(range(len(placed)), key=lambda index: (placed[index][0].number, placed[index][0].first)):
        site, pair = placed[index]
        a, at = at, at + _aligned(pair, 0)
        b, at = at, at + _aligned(pair, 1)
        parts[index] = PackedPart(site, pair.rank, pair.scale * site.gain, pair.narrow, a, b)
    return tuple(parts[index] for index in range(len(placed)))


def pack(adapter: PackedAdapter, part: PackedPart, a: Array, b: Array) -> None:
    """Writes matrices ``a`` (rank, inputs) and ``b`` (outputs, rank), float32 or bf16's bits as uint16, to their
    place in ``adapter``.
    """
    pack_first(adapter, part, 0, a)
    pack_second(adapter, part, 0, b)


class Packer:
    """Packs the two matrices of one part by rows, as they are read."""

    def __init__(self, adapter: PackedAdapter, part: PackedPart) -> None:
        self.first = partial(pack_first, adapter, part)
        self.second = partial(pack_second, adapter, part)


def pack_first(adapter: PackedAdapter, part: PackedPart, first: int, rows: Array) -> None:
    """Writes ``rows`` of matrix A, (rank, inputs), from row ``first`` on."""
    kept, packed = stored(rows, part.narrow), adapter.first(part)
    if part.site.looked_up:
        packed[:, first : first + len(rows)] = kept.T
    else:
        packed[first : first + len(rows)] = kept


def pack_second(adapter: PackedAdapter, part: PackedPart, first: int, rows: Array) -> None:
    """Writes ``rows`` of matrix B, (outputs, rank), from row ``first`` on, a multiple of PANEL."""
    panels = adapter.second(part)[first // PANEL : -(-(first + len(rows)) // PANEL)]
    pack_b(stored(rows, part.narrow), panels)


def pack_at(adapter: PackedAdapter, part: PackedPart, rank: int, outputs: NDArray[np.int64], rows: Array) -> None:
    """Writes ``rows`` of matrix B, (len(outputs), ranks), to ``outputs`` and the ranks from ``rank`` on."""
    packed = adapter.second(part)[:, rank : rank + rows.shape[1]]
    packed[outputs // PANEL, :, outputs % PANEL] = stored(rows, part.narrow)


def _aligned(pair: MatrixPair, which: int) -> int:
    return -(-pair.elements[which] * (2 if pair.narrow else 4) // 64) * 64


def stored(values: Array, narrow: bool) -> Array:
    """Returns ``values`` as float32, or as bf16's bits, rounded to nearest even as torch does."""
    if narrow == (values.dtype == np.uint16):
        return values
    if not narrow:
        return (values.astype(np.uint32) << 16).view(np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
