"""Tells an engine that computes a long step from one that is stuck: neither answers, and only one gets on.

An engine answers between two steps. On a busy machine, or with a large model, a healthy step may take longer than
any time that one would wait for an engine that hangs. Knows nothing of what is asked, or of who asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from baton.process.effort import Efforts, gained

T = TypeVar("T")
LOOK_S = 0.25  # seconds between two looks at what an engine that doesn't answer does
SHARE = 0.2  # of the time between two looks, in which one of its threads computes or waits for a core
PATIENCE = 12  # limits of silence for which one may compute and not answer: beyond, it computes in circles


class EngineProgress:
    """Watches an engine that was asked something. ``efforts`` are its threads' so far, none where nobody knows.

    One that computed for ``most_s`` seconds and hasn't answered is stuck; those in which it waited for a core don't
    count, because they are the machine's.
    """

    def __init__(self, efforts: Callable[[], Efforts], most_s: float) -> None:
        self._efforts, self._most_s = efforts, most_s
        self._first: Efforts | None = None  # as it was first looked at since it answered

    def answered(self) -> None:
        """Notes that the engine has answered: it is between two steps."""
        self._first = None

    async def computes_instead(self, answer: asyncio.Future[T]) -> bool:
        """Returns False when ``answer`` is there, True when the engine gets on with a step meanwhile.

        It doesn't return while neither is so.
        """
        now = asyncio.get_running_loop().time
        await asyncio.wait({answer}, timeout=LOOK_S)  # most answer by then, and nobody has to look
        while not answer.done():
            began, before = now(), self._efforts()
            self._first = self._first or before
            await asyncio.wait({answer}, timeout=LOOK_S)
            after = self._efforts()
            gets_on = gained(before, after).total >= SHARE * (now() - began)
            if not answer.done() and gets_on and gained(self._first or before, after).computed < self._most_s:
                return True
        return False
