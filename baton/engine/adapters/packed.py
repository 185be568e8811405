"""Packs an adapter's matrices into one memory, as every backend reads them. Torch-free.

Knows nothing of files. First matrices lie (rank, inputs), beside an embedding (tokens, rank); second ones in panels
(kernels/lora/lora.h). Each begins at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.adapters.matrices import MatrixPair
from baton.engine.program.sites import Site
from baton.kernels.lora.structs import PANEL, pack_b, panelled, unpack_b

Array = NDArray[Any]


class PackedPart(msgspec.Struct, frozen=True, array_like=True):
    """Says what stands beside one site's outputs, and at which bytes its matrices lie. ``narrow``: in bf16."""

    site: Site
    rank: int
    scale: float
    narrow: bool
    a: int
    b: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Returns how its numbers are stored: float32, or bf16's bits as uint16."""
        return np.dtype(np.uint16 if self.narrow else np.float32)


class PackedAdapter(msgspec.Struct, frozen=True):
    """Holds an adapter that can be applied: its parts, and the memory that they point into."""

    parts: tuple[PackedPart, ...]
    memory: memoryview

    def first(self, part: PackedPart) -> Array:
        """Returns a part's first matrix, (rank, inputs) or (tokens, rank)."""
        shape = (part.site.inputs, part.rank) if part.site.looked_up else (part.rank, part.site.inputs)
        return self._view(part, part.a, shape)

    def second(self, part: PackedPart) -> Array:
        """Returns a part's second matrix as it is packed, (outputs / 64 up, rank, 64)."""
        return self._view(part, part.b, (panelled(part.site.outputs) // PANEL, part.rank, PANEL))

    def plain_second(self, part: PackedPart) -> Array:
        """Returns a part's second matrix as (outputs, rank)."""
        return unpack_b(self.second(part), part.site.outputs)

    def _view(self, part: PackedPart, at: int, shape: tuple[int, ...]) -> Array:
        return np.frombuffer(self.memory, part.dtype, int(np.prod(shape)), at).reshape(shape)


def laid_out(pairs: Sequence[MatrixPair]) -> tuple[PackedPart, ...]:
    """Returns where each pair's matrices go; the memory needs the sum of the pairs' bytes."""
    parts, at = [], 0
    for pair in pairs:
        a, at = at, at + _aligned(pair, 0)
        b, at = at, at + _aligned(pair, 1)
        parts.append(PackedPart(pair.site, pair.rank, pair.scale * pair.site.gain, pair.narrow, a, b))
    return tuple(parts)


def pack(adapter: PackedAdapter, part: PackedPart, a: Array, b: Array) -> None:
    """Writes the matrices (rank, inputs) and (outputs, rank) into the part's place; they are float32, or bf16 as
    uint16.
    """
    a, b = _stored(a, part.narrow), _stored(b, part.narrow)
    adapter.first(part)[:] = a.T if part.site.looked_up else a
    pack_b(b, adapter.second(part))


def _aligned(pair: MatrixPair, which: int) -> int:
    return -(-pair.elements[which] * (2 if pair.narrow else 4) // 64) * 64


def _stored(values: Array, narrow: bool) -> Array:
    """As float32 or as bf16's bits; rounding is to nearest even, as torch rounds."""
    if narrow == (values.dtype == np.uint16):
        return values
    if not narrow:
        return (values.astype(np.uint32) << 16).view(np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
