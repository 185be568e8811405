"""A counter of changes to the cluster as a router sees it, by which cached snapshots are invalidated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.process.turns import call_in_turns

# Seconds for which changes are gathered before those that wait are woken: each choice that a lost worker gives back
# is a change, and all of them may wait.
GATHER_S = 0.02


class ClusterRevision:
    """Counts changes to the cluster in ``number``; ``on_change`` is called at each, because room for a request may
    have appeared.
    """

    __slots__ = ("_on_change", "_waiters", "_waking", "number")

    def __init__(self, on_change: Callable[[], object]) -> None:
        self._on_change = on_change
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they began to wait
        self._waking: asyncio.TimerHandle | None = None
        self.number = 0

    def advance(self) -> None:
        """Counts one change, calls ``on_change``, and wakes those that wait for one within GATHER_S."""
        self.number += 1
        if self._waiters and self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(GATHER_S, self._wake)
        self._on_change()

    async def changed(self, within_s: float) -> None:
        """Waits for the next change, which is told GATHER_S late, ``within_s`` seconds at most."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(within_s, _resolve, waiter)
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            timer.cancel()
            del self._waiters[waiter]

    def _wake(self) -> None:
        self._waking = None
        call_in_turns(_resolve, self._waiters)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
