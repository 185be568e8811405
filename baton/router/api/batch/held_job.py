"""A batch job that a lane holds: its claim, what lies of it in the store, and whether somebody asked to cancel it.

Knows nothing of lines or of how they are answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from baton.cluster.batch_nouns import JobClaim
from baton.protos.json import Json

FRESH_S = 0.05  # seconds for which everybody who works on a job takes what the store said last of its cancel


class JobCancel:
    """Knows whether a job is to be cancelled, by one look at the store for all who ask at about the same time.

    ``look`` asks the store.
    """

    def __init__(self, look: Callable[[], Awaitable[int]]) -> None:
        self._look, self._looking = look, asyncio.Lock()
        self._looked_at = float("-inf")
        self._asked = asyncio.Event()

    @property
    def is_asked(self) -> bool:
        """Returns whether a look has found that the job is to be cancelled."""
        return self._asked.is_set()

    async def now(self) -> bool:
        """Returns whether the job is to be cancelled, as the store said FRESH_S ago at most."""
        clock = asyncio.get_running_loop().time
        async with self._looking:
            if not self.is_asked and clock() - self._looked_at >= FRESH_S:
                looked_at = clock()
                if await self._look():
                    self._asked.set()
                self._looked_at = looked_at
        return self.is_asked

    async def within(self, seconds: float) -> None:
        """Waits ``seconds``, or until somebody's look finds that the job is to be cancelled."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._asked.wait()


class HeldJob:
    """Holds a claim as its lane sees it.

    It is good ``until`` (on the loop's clock); ``stored`` bytes of answers lie in the store, and the job ``waits``
    while that has no room. ``lines`` are those under way. ``refused`` is the error for which no further line is
    answered.
    """

    def __init__(self, claim: JobClaim, until: float, cancel: JobCancel) -> None:
        self.claim, self.until, self.cancel = claim, until, cancel
        self.stored = 0
        self.waits = False
        self.lines: set[asyncio.Task[None]] = set()
        self.refused: Json | None = None
