"""How many bytes of one handoff are on their way, unacknowledged, and for how long there were any.

Knows nothing of what a block holds or of how it is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from baton.protos.errors import CorruptFrame


class SendWindow:
    """Keeps ``size`` bytes at most on their way. ``busy_s`` is the time with bytes unacknowledged, by ``clock``."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self.busy_s = 0.0
        self._size, self._clock = size, clock
        self._unacked: set[int] = set()  # blocks, by their index at the receiver
        self._unflagged = 0  # bytes since an acknowledgement was asked for
        self._room = asyncio.Event()
        self._busy_since = 0.0

    async def room(self, unit: int) -> int:
        """Waits until a block of ``unit`` bytes may go; returns how many may, one at least."""
        while self._unacked and (len(self._unacked) + 1) * unit > self._size:
            self._room.clear()
            await self._room.wait()
        return max(1, self._size // unit - len(self._unacked))

    def sent(self, blocks: Iterable[int]) -> None:
        """Counts ``blocks`` as on their way."""
        if not self._unacked:
            self._busy_since = self._clock()
        self._unacked.update(blocks)

    def acknowledged(self, blocks: Iterable[int]) -> None:
        """Counts ``blocks`` as arrived. Raises CorruptFrame for one that wasn't sent."""
        blocks = tuple(blocks)
        if not self._unacked.issuperset(blocks):
            raise CorruptFrame("an acknowledgement of blocks that were not sent", "index")
        self._unacked.difference_update(blocks)
        self._room.set()
        if blocks and not self._unacked:
            self.busy_s += self._clock() - self._busy_since

    def all_acknowledged(self) -> None:
        """Counts everything that is on its way as arrived."""
        self.acknowledged(tuple(self._unacked))

    def wants_ack(self, size: int, has_more: bool) -> bool:
        """Tells whether a frame of ``size`` bytes is to ask for an acknowledgement, as the sender may wait for it.

        That is so where nothing else is ready, or a quarter of the window went out since the last one asked.
        """
        self._unflagged += size
        if has_more and self._unflagged < self._size // 4:
            return False
        self._unflagged = 0
        return True
