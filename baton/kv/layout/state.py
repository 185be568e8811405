"""Defines how a sequence's recurrent state is laid out in pages, and the hashes of its checkpoints. Torch-free.

Knows nothing of memory, of sequences or of how state is computed. A state is what the layers
without K and V keep of a sequence. It is laid out plane after plane, each [layer][shape], float32, and takes as
many pages of the pool as it needs, the rest of the last one zeros:

    pages of one state    [conv of layer 0, 1, … | delta of layer 0, 1, …      ][…          | zeros]

A checkpoint is a state at the end of a full block. Its pages are blocks of their own, found, shipped, verified,
evicted like K and V, each by

    SHA-256("baton.state.v1" NUL, the 32 bytes of the block's hash, u32 number of the page)         little-endian
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from hashlib import sha256

from baton.protos.nouns import KvLayout, StatePlane

ITEM_BYTES = 4  # of a float32: recurrent sums over long sequences would lose too much precision in fewer bytes
_DOMAIN = b"baton.state.v1\x00"


def plane_bytes(plane: StatePlane) -> int:
    """Returns the bytes of ``plane``, all layers together."""
    return plane.layers * math.prod(plane.shape) * ITEM_BYTES


def state_bytes(layout: KvLayout) -> int:
    """Returns the bytes of one sequence's recurrent state, 0 for models that have none."""
    return sum(plane_bytes(plane) for plane in layout.states)


def state_pages(layout: KvLayout) -> int:
    """Returns how many pages one sequence's recurrent state takes, 0 for models that have none."""
    return -(-state_bytes(layout) // max(1, layout.page_bytes))


def state_offsets(layout: KvLayout) -> dict[str, int]:
    """Returns the byte offset of each plane in a state, by the plane's name."""
    offsets, at = {}, 0
    for plane in layout.states:
        offsets[plane.name] = at
        at += plane_bytes(plane)
    return offsets


def state_hashes(block: bytes, pages: int) -> Iterator[bytes]:
    """Yields the hash of each of the ``pages`` pages that hold the state after the block of hash ``block``."""
    for number in range(pages):
        yield sha256(_DOMAIN + block + struct.pack("<I", number)).digest()
