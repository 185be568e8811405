"""Says how a sequence's recurrent state lies in pages, and by which hashes its checkpoints are found. Torch-free.

Knows nothing of memory, of sequences or of how state is computed. A state is what a sequence's layers without K and
V know after some tokens. It is laid out plane after plane, each [layer][shape], float32, and fills as many pages of
the pool as it needs, zeros behind it:

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

ITEM_BYTES = 4  # bytes of a number of state, a float32, because sums that go on for ever round in anything shorter
_DOMAIN = b"baton.state.v1\x00"


def plane_bytes(plane: StatePlane) -> int:
    """Returns the bytes of ``plane``, all layers."""
    return plane.layers * math.prod(plane.shape) * ITEM_BYTES


def state_bytes(layout: KvLayout) -> int:
    """Returns the bytes of one sequence's state, 0 for models without."""
    return sum(plane_bytes(plane) for plane in layout.states)


def state_pages(layout: KvLayout) -> int:
    """Returns the pages that one state takes, 0 for models without."""
    return -(-state_bytes(layout) // max(1, layout.page_bytes))


def state_offsets(layout: KvLayout) -> dict[str, int]:
    """Returns where each plane begins in a state, in bytes, by name."""
    offsets, at = {}, 0
    for plane in layout.states:
        offsets[plane.name] = at
        at += plane_bytes(plane)
    return offsets


def state_hashes(block: bytes, pages: int) -> Iterator[bytes]:
    """Yields the hashes of the ``pages`` pages that hold the state after the block of hash ``block``."""
    for number in range(pages):
        yield sha256(_DOMAIN + block + struct.pack("<I", number)).digest()
