"""Runs kv_copy natively, all blocks in one call without the interpreter's lock. Torch-free.

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
    """Copies blocks of ``size`` bytes from addresses ``src`` to ``dst``, if given; returns the XXH3-64 of each.

    ``dst`` and ``src`` have the same length, and nobody may write to these places meanwhile.
    """
    if size < LEAST_BYTES or native.library() is None:
        return reference.kv_copy(dst, src, size)
    return run(_function(), dst, src, size)


def run(function: NativeFunction, dst: Sequence[int] | None, src: Sequence[int], size: int) -> list[int]:
    """Calls ``function``, a library's baton_kv_copy, once; returns the checksums."""
    sources, sums = array("Q", src), array("Q", bytes(8 * len(src)))
    places = None if dst is None else array("Q", dst)
    function(None if places is None else _at(places), _at(sources), len(sources), size, _at(sums))
    return sums.tolist()


def copy_only(dst: Sequence[int], src: Sequence[int], size: int) -> None:
    """Copies blocks of ``size`` bytes from addresses ``src`` to ``dst`` without checksums, for benchmarks."""
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
