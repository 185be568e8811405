"""A watchdog of an engine: asked every second, it must answer between two steps.

Knows nothing of health, of slots, or of what is done with a stuck engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PAUSE_S = 1.0  # between two questions, at most
SHARES = 5  # of the limit: one is the pause, one for an answer that waits unread while this process was held up


class EngineWatch:
    """Watches one engine: ``ask`` returns when the engine has answered, or is dead.

    ``tell(True)`` is called when it has been silent for ``limit_s`` seconds, ``tell(False)`` when it answers again.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        tell: Callable[[bool], Awaitable[None]],
        limit_s: float,
    ) -> None:
        self._ask, self._tell, self._limit_s = ask, tell, limit_s

    async def run(self) -> None:
        """Returns once the engine has been silent for twice the limit; with a limit of 0, never."""
        if not self._limit_s:
            await asyncio.Event().wait()
        pause = min(PAUSE_S, self._limit_s / SHARES)
        while await self._answers(self._limit_s - pause):  # noqa: ASYNC110
            await asyncio.sleep(pause)

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
