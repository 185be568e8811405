"""A counter of changes to the cluster as a router sees it, by which cached snapshots are invalidated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ClusterRevision:
    """Counts changes to the cluster in ``number``; ``on_change`` is called at each, because room for a request may
    have appeared.
    """

    __slots__ = ("_on_change", "_waiters", "number")

    def __init__(self, on_change: Callable[[], object]) -> None:
        self._on_change = on_change
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they began to wait
        self.number = 0

    def advance(self) -> None:
        """Counts one change, wakes those that wait for it and calls ``on_change``."""
        self.number += 1
        for waiter in self._waiters:
            _resolve(waiter)
        self._on_change()

    async def changed(self, within_s: float) -> None:
        """Waits for the next change, ``within_s`` seconds at most."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(within_s, _resolve, waiter)
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            timer.cancel()
            del self._waiters[waiter]


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
