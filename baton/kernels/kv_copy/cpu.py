"""Runs kv_copy on native code, all blocks in one call that holds no lock of the interpreter. Torch-free.

Knows nothing of pages, frames or leases.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache

from baton.kernels.abi import native
from baton.kernels.abi.native import I64, NativeFunction, P
from baton.kernels.kv_copy import reference

ARGUMENTS = (P, P, I64, I64, P)
LEAST_BYTES = 241  # bytes of the smallest block that native code takes (kv_copy.h: KV_COPY_LEAST)


def kv_copy(dst: Sequence[int] | None, src: Sequence[int], size: int) -> list[int]:
    """Does what the reference does, where nobody writes to the places meanwhile; ``dst`` and ``src`` are
    equally long.
    """
    if size < LEAST_BYTES or native.library() is None:
        return reference.kv_copy(dst, src, size)
    return run(_function(), dst, src, size)


def run(function: NativeFunction, dst: Sequence[int] | None, src: Sequence[int], size: int) -> list[int]:
    """Calls baton_kv_copy once, from whichever library. Returns the checksums."""
    sources, sums = array("Q", src), array("Q", bytes(8 * len(src)))
    places = None if dst is None else array("Q", dst)
    function(None if places is None else _at(places), _at(sources), len(sources), size, _at(sums))
    return sums.tolist()


def copy_only(dst: Sequence[int], src: Sequence[int], size: int) -> None:
    """Copies without a checksum, for benchmarks to compare with."""
    if native.library() is None:
        for place, source in zip(dst, src, strict=True):
            reference.ctypes.memmove(place, source, size)
        return
    places, sources = array("Q", dst), array("Q", src)
    _function()(_at(places), _at(sources), len(sources), size, None)


@cache
def _function() -> NativeFunction:
    return native.function("kv_copy", *ARGUMENTS)


def _at(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
