"""Manages memory of a card that frames' blocks take in turn, on their way from one process to another on that card.

Knows nothing of frames or streams. Its owner fills it, from the host's memory or from the card's own; the reader
says when the oldest part can go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from baton.kv.memory.cuda_driver import Driver
from baton.protos.errors import ConfigError


class Ring:
    """Owns ``size`` bytes of a card as a ring. ``taken`` holds (begin, end) of the parts in use, the oldest
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
        """Reserves ``size`` contiguous bytes and returns where they begin; None while there are none."""
        begin = self._room(size)
        if begin is not None:
            self.taken.append((begin, begin + size))
        return begin

    def fill(self, begin: int, payload: Sequence[memoryview]) -> tuple[int, ...]:
        """Copies blocks to the ring from ``begin`` on. Returns where each lies, in bytes from the ring's
        begin.
        """
        places = []
        for view in payload:
            self.cuda.upload(self.at + begin, view)
            places.append(begin)
            begin += len(view)
        self.cuda.wait()
        return tuple(places)

    def close(self) -> None:
        """Frees the memory. A receiver that has it open still must not read it."""
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
