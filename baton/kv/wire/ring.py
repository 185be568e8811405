"""Manages a ring buffer in GPU memory through which blocks go from one process to another on that GPU.

Knows nothing of frames or streams. Its owner fills it, from host or GPU memory; the reader says when the oldest
part can be reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from baton.kv.memory.cuda_driver import Driver
from baton.protos.errors import ConfigError


class Ring:
    """Owns ``size`` bytes of GPU memory as a ring. ``taken`` holds (begin, end) of the parts in use, the oldest
    first.
    """

    def __init__(self, cuda: Driver, size: int) -> None:
        self.size, self.taken = size, deque[tuple[int, int]]()
        self.cuda, self.at = cuda, cuda.allocate(size)
        try:
            self.handle = cuda.share(self.at)
        except ConfigError:
            cuda.free(self.at)
            raise

    def take(self, size: int) -> int | None:
        """Reserves ``size`` contiguous bytes; returns their offset in the ring, or None while there are none."""
        begin = self._room(size)
        if begin is not None:
            self.taken.append((begin, begin + size))
        return begin

    def fill(self, begin: int, payload: Sequence[memoryview]) -> tuple[int, ...]:
        """Copies blocks from host memory into the ring from offset ``begin``; returns the offset of each."""
        places = []
        for view in payload:
            self.cuda.upload(self.at + begin, view)
            places.append(begin)
            begin += len(view)
        self.cuda.wait()
        return tuple(places)

    def close(self) -> None:
        """Frees the GPU memory. A receiver that still has it open must not read it."""
        self.cuda.free(self.at)

    def _room(self, size: int) -> int | None:
        if not self.taken:
            return 0 if size <= self.size else None
        oldest, newest = self.taken[0][0], self.taken[-1][1]
        if newest <= oldest:  # the newest lie before the oldest
            return newest if newest + size <= oldest else None
        if newest + size <= self.size:
            return newest
        return 0 if size <= oldest else None
