"""Checks what holds of baton_kv_copy, whichever library it is in; each check takes the library, by the xxhash
library.

Knows nothing of pytest. Each check raises AssertionError where the library is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from baton.kernels.abi.native import declare
from baton.kernels.kv_copy import cpu

RNG = np.random.default_rng(11)
DATA = RNG.integers(0, 256, 200_000, dtype=np.uint8)
# around the shortest, a stripe (64), a round of them (1024), a frame's piece; and what a page really has
SIZES = (*range(241, 330), 1023, 1024, 1025, 1088, 1089, 2047, 2048, 2049, 4096, 65_535, 65_536, 131_072, 131_137)


def call(library: ctypes.CDLL) -> Callable[..., list[int]]:
    function = declare(library, "kv_copy", *cpu.ARGUMENTS)
    return lambda dst, src, size: cpu.run(function, dst, src, size)


def copies_and_sums_are_right(library: ctypes.CDLL, sizes: Sequence[int] = SIZES) -> None:
    copy = call(library)
    for size in sizes:
        for offset in (0, 1, 32):
            memory = np.full(3 * (size + 128), 0xEE, np.uint8)
            first = -memory.ctypes.data % 64 + offset
            starts = [first + 64, first + 64 + size + 64]
            sources = [int(RNG.integers(0, len(DATA) - size)) for _ in starts]
            sums = copy([memory.ctypes.data + at for at in starts], [DATA.ctypes.data + at for at in sources], size)
            left = np.ones(len(memory), bool)
            for to, source, checksum in zip(starts, sources, sums, strict=True):
                assert (memory[to : to + size] == DATA[source : source + size]).all(), (size, offset)
                assert checksum == xxhash.xxh3_64_intdigest(DATA[source : source + size].data), (size, offset)
                left[to : to + size] = False
            assert (memory[left] == 0xEE).all(), "it wrote beside its places"


def what_is_hashed_is_the_copy(library: ctypes.CDLL) -> None:
    """The copy overwrites its own source, 16 bytes behind the reading, so that the source has changed when it is
    hashed.
    """
    for size in (1089, 1135, 4000):
        for offset in (0, 1):
            memory = np.zeros(size + 256, np.uint8)
            at = -memory.ctypes.data % 64 + offset
            memory[at + 16 : at + 16 + size] = DATA[:size]
            [checksum] = call(library)([memory.ctypes.data + at], [memory.ctypes.data + at + 16], size)
            assert (memory[at : at + size] == DATA[:size]).all()
            assert checksum == xxhash.xxh3_64_intdigest(DATA[:size].data), (size, offset)
