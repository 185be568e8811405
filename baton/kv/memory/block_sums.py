"""Copies blocks and takes their checksums: XXH3-64 by native code if there is any. Torch-free.

Knows nothing of frames or pages. Nothing in the product changes it; a bench that measures what checksums cost takes
them in another way for the length of one handoff (``using``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import xxhash

from baton.kernels.kv_copy.cpu import kv_copy

Bytes = bytes | bytearray | memoryview
Copy = Callable[[Sequence[int] | None, Sequence[int], int], list[int]]
"""Copies from addresses (second) to addresses (first; None: nowhere), ``size`` bytes (third) each; returns the
checksum of each.
"""


class Digest(Protocol):
    """Computes a checksum of bytes that are given piece by piece."""

    def update(self, data: Bytes, /) -> None:
        """Adds the next bytes to the checksum."""

    def intdigest(self) -> int:
        """Returns the checksum of all bytes added since the last ``reset``."""

    def reset(self) -> None:
        """Clears the checksum, because another block follows."""


class BlockSums(NamedTuple):
    """Says how checksums of blocks are taken: as blocks are copied, of a whole block, and piece by piece."""

    copy: Copy
    of: Callable[[Bytes], int]
    digest: Callable[[], Digest]


def checksum(data: Bytes) -> int:
    """Returns the XXH3-64 of ``data``, of any length."""
    return int(xxhash.xxh3_64_intdigest(data))


XXH3 = BlockSums(kv_copy, checksum, xxhash.xxh3_64)
_used = XXH3


def used() -> BlockSums:
    """Returns how this process takes checksums of blocks now."""
    return _used


@contextmanager
def using(sums: BlockSums) -> Iterator[None]:
    """Takes checksums of blocks by ``sums`` while the block runs, in the whole process. For benches alone."""
    global _used
    before, _used = _used, sums
    try:
        yield
    finally:
        _used = before
