"""A watchdog of an engine: asked a while after its last answer, it must answer between two steps.

Knows nothing of health, of slots, or of what is done with a stuck engine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

PAUSE_S = 1.5  # after an answer, whoever asked, at most: longer than routers pause, so that they come first
SOON = 0.1  # share of the pause that isn't waited for
PAUSE_SHARE = 0.3  # of the limit that is the pause at most
SHARES = 5  # of the limit: one for an answer that waits unread while this process was held up


class EngineWatch:
    """Watches one engine: ``ask`` returns when the engine has answered, or is dead.

    ``tell(True)`` is called when it has been silent for ``limit_s`` seconds, ``tell(False)`` when it answers again.
    ``silent_s`` returns the seconds since it answered anybody: while others ask often enough, this needn't.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        tell: Callable[[bool], Awaitable[None]],
        limit_s: float,
        silent_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._ask, self._tell, self._limit_s, self._silent_s = ask, tell, limit_s, silent_s

    async def run(self) -> None:
        """Returns once the engine has been silent for twice the limit; with a limit of 0, never."""
        if not self._limit_s:
            await asyncio.Event().wait()
        pause = min(PAUSE_S, PAUSE_SHARE * self._limit_s)
        while await self._answers(self._limit_s - pause):
            await asyncio.sleep(pause)
            while (rest := pause - self._silent_s()) > SOON * pause:  # noqa: ASYNC110
                await asyncio.sleep(rest)

    async def _answers(self, seconds: float) -> bool:
        asked = asyncio.ensure_future(self._ask())
        try:
            if await self._done(asked, seconds):
                return True
            await self._tell(True)
            if not await self._done(asked, self._limit_s):
                return False
            await self._tell(False)
            return True
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _done(self, asked: asyncio.Future[object], seconds: float) -> bool:
        spare = self._limit_s / SHARES
        for patience in (seconds - spare, spare):
            await asyncio.wait({asked}, timeout=patience)
        return asked.done()
