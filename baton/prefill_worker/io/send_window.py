"""Limits how many bytes of one handoff are unacknowledged, and measures for how long there were any.

Knows nothing of what a block holds or of how it is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from baton.protos.errors import CorruptFrame


class SendWindow:
    """Keeps at most ``size`` bytes unacknowledged. ``busy_s`` is the seconds with unacknowledged bytes, by
    ``clock``.
    """

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self.busy_s = 0.0
        self._size, self._clock = size, clock
        self._unacked: set[int] = set()  # blocks, by their index at the receiver
        self._unflagged = 0  # bytes since an acknowledgement was asked for
        self._room = asyncio.Event()
        self._busy_since = 0.0

    async def room(self, unit: int) -> int:
        """Waits until a block of ``unit`` bytes may be sent; returns how many may be, at least 1."""
        while self._unacked and (len(self._unacked) + 1) * unit > self._size:
            self._room.clear()
            await self._room.wait()
        return max(1, self._size // unit - len(self._unacked))

    def sent(self, blocks: Iterable[int]) -> None:
        """Counts ``blocks``, by index, as sent."""
        if not self._unacked:
            self._busy_since = self._clock()
        self._unacked.update(blocks)

    def acknowledged(self, blocks: Iterable[int]) -> None:
        """Counts ``blocks`` as received. Raises CorruptFrame for one that wasn't sent."""
        blocks = tuple(blocks)
        if not self._unacked.issuperset(blocks):
            raise CorruptFrame("an acknowledgement of blocks that were not sent", "index")
        self._unacked.difference_update(blocks)
        self._room.set()
        if blocks and not self._unacked:
            self.busy_s += self._clock() - self._busy_since

    def all_acknowledged(self) -> None:
        """Counts all blocks that were sent as received."""
        self.acknowledged(tuple(self._unacked))

    def wants_ack(self, size: int, has_more: bool) -> bool:
        """Returns whether a frame of ``size`` bytes should ask for an acknowledgement.

        It should if nothing else is ready, or if a quarter of the window was sent since the last frame that did.
        """
        self._unflagged += size
        if has_more and self._unflagged < self._size // 4:
            return False
        self._unflagged = 0
        return True
