"""The queue of what one handoff is to send: blocks in the receiver's sizes, then how the prompt ended.

Knows nothing of streams, frames or windows.
"""

from __future__ import annotations

import asyncio
from collections import deque

from baton.kv.wire.control import Closing
from baton.prefill_worker.io.wire_plan import SentBlock, WirePlan
from baton.protos.channel import ShipBlock
from baton.protos.errors import BatonError

QueueItem = ShipBlock | Closing | BatonError
"""A finished block; what closes the handoff; or why its prompt won't be computed."""


class SendQueue:
    """Blocks to be sent, then the end of a handoff; filled at any time as the prompt is computed, emptied by one
    stream.
    """

    def __init__(self) -> None:
        self._items: asyncio.Queue[QueueItem] = asyncio.Queue()
        self._ahead: QueueItem | None = None  # taken out of the queue, but not a block
        self._ready: deque[SentBlock] = deque()  # of what was taken out of the queue, not sent yet

    def put(self, item: QueueItem) -> None:
        """Adds ``item`` at the end."""
        self._items.put_nowait(item)

    @property
    def has_more(self) -> bool:
        """Returns whether anything can be sent without waiting for the engine."""
        return self._ahead is not None or bool(self._ready) or not self._items.empty()

    async def next(self, wire: WirePlan) -> SentBlock | Closing | BatonError:
        """Waits for the next item and returns it: a block as ``wire``'s receiver takes it, or what ends the
        handoff.
        """
        while not self._ready:
            ahead, self._ahead = self._ahead, None
            item = await self._items.get() if ahead is None else ahead
            if not isinstance(item, ShipBlock):
                return item
            self._ready.extend(wire.take(item))
        return self._ready.popleft()

    def more(self, wire: WirePlan, most: int) -> list[SentBlock]:
        """Returns at most ``most`` blocks that are ready now; an item that ends the handoff stays queued."""
        found: list[SentBlock] = []
        while len(found) < most and (self._ready or (self._ahead is None and not self._items.empty())):
            if self._ready:
                found.append(self._ready.popleft())
            elif isinstance(item := self._items.get_nowait(), ShipBlock):
                self._ready.extend(wire.take(item))
            else:
                self._ahead = item
        return found
