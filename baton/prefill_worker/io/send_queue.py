"""What of one prompt is to be sent, in order: blocks as its receiver takes them, then how it ends.

Knows nothing of streams, frames or windows.
"""

from __future__ import annotations

import asyncio
from collections import deque

from baton.kv.layout.repaging import ReceiverBlock
from baton.kv.wire.control import Closing
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import ShipBlock
from baton.protos.errors import BatonError

QueueItem = ShipBlock | Closing | BatonError
"""A finished block; what closes the handoff; or why its prompt won't be computed."""


class SendQueue:
    """Filled as the prompt is computed, at any time; emptied by one stream."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[QueueItem] = asyncio.Queue()
        self._ahead: QueueItem | None = None  # taken out of the queue, but not a block
        self._ready: deque[ShipBlock | ReceiverBlock] = deque()  # of what was taken out of the queue, not sent yet

    def put(self, item: QueueItem) -> None:
        """Adds ``item`` behind all others."""
        self._items.put_nowait(item)

    @property
    def has_more(self) -> bool:
        """Tells whether something can be sent without waiting for the engine."""
        return self._ahead is not None or bool(self._ready) or not self._items.empty()

    async def next(self, wire: WirePlan) -> QueueItem | ReceiverBlock:
        """Returns the next block or piece for ``wire``'s receiver, or what comes after the last; waits for it."""
        while not self._ready:
            ahead, self._ahead = self._ahead, None
            item = await self._items.get() if ahead is None else ahead
            if not isinstance(item, ShipBlock):
                return item
            self._ready.extend(wire.take(item))
        return self._ready.popleft()

    def more(self, wire: WirePlan, most: int) -> list[ShipBlock | ReceiverBlock]:
        """Returns blocks that are ready by now, ``most`` at most; what isn't a block stays queued behind them."""
        found: list[ShipBlock | ReceiverBlock] = []
        while len(found) < most and (self._ready or (self._ahead is None and not self._items.empty())):
            if self._ready:
                found.append(self._ready.popleft())
            elif isinstance(item := self._items.get_nowait(), ShipBlock):
                self._ready.extend(wire.take(item))
            else:
                self._ahead = item
        return found
