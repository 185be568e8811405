"""Copies and checksums blocks of memory, one after the other. Torch-free.

Knows nothing of pages, frames or leases.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import xxhash


def kv_copy(dst: Sequence[int] | None, src: Sequence[int], size: int) -> list[int]:
    """Returns the XXH3-64 of the ``size`` bytes at each address of ``src``, copied to those of ``dst`` unless it is
    None.
    """
    sums = []
    for number, address in enumerate(src):
        if dst is not None:
            address = ctypes.memmove(dst[number], address, size)
        sums.append(xxhash.xxh3_64_intdigest((ctypes.c_char * size).from_address(address)))
    return sums
