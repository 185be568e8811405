"""Finds out whether the other hosts of a worker's ranks can ship KV to a receiver, and remembers it.

Knows nothing of handoffs or of how a host ships. A handoff waits for a host's first answer for a moment only, and
not at all while a host that couldn't reach a receiver is asked again, from time to time. Until the host says yes,
the worker's own host sends in its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import NamedTuple

from baton.protos.rpc import settled

log = logging.getLogger("baton.kv")

FIRST_S = 2.0  # seconds that a handoff waits for a first answer, because the own host can send instead
AGAIN_S = 30.0  # seconds until a host that couldn't reach a receiver is asked again, as the worker's own host
KEPT = 1024  # ways remembered; the oldest is forgotten first, because receivers come and go


class Way(NamedTuple):
    """Leads from the KV sender at ``host`` to process ``incarnation`` of the receiver at ``address``."""

    host: str
    address: str
    incarnation: str


Ask = Callable[[Way], Coroutine[None, None, str]]
"""Returns why a way doesn't work, "" if it does. It must end by itself."""


class HostWays:
    """Remembers which ways work; ``clock`` is in monotonic seconds. A first answer is waited for ``first_s``."""

    def __init__(self, ask: Ask, clock: Callable[[], float], first_s: float = FIRST_S) -> None:
        self._ask, self._clock, self._first_s = ask, clock, first_s
        self._asked: dict[Way, asyncio.Task[str]] = {}
        self._until: dict[Way, float] = {}  # of those that don't work: when their hosts are asked again

    async def works(self, way: Way) -> bool:
        """Returns whether ``way`` works; its host is asked first if that isn't known. False also if it doesn't
        answer in time: whoever comes after its answer hears that.
        """
        now = self._clock()
        if now < self._until.get(way, now):
            return False
        asked = self._asking(way)
        if way in self._until and not asked.done():
            return False
        self._until.pop(way, None)
        await asyncio.wait({asked}, timeout=self._first_s)
        if not asked.done():
            self._rule_out(way, now)
            return False
        try:
            problem = asked.result()
        except Exception:  # it is no answer for whoever comes next
            self.forget(way)
            raise
        if not problem:
            return True
        if self._asked.get(way) is asked:
            del self._asked[way]
            self._rule_out(way, now + AGAIN_S)
            log.warning(
                "what the ranks at %s have of KV goes to %s by their worker's own host: %s", *way[:2], problem
            )
        return False

    def forget(self, way: Way) -> None:
        """Has the way's host asked again by the next handoff, because one has failed there."""
        asked = self._asked.get(way)
        if asked is not None and asked.done():
            del self._asked[way]

    async def close(self) -> None:
        """Ends all questions that hosts have not answered."""
        asked = tuple(self._asked.values())
        self._asked.clear()
        for each in asked:
            each.cancel()
        await settled(asked)

    def _rule_out(self, way: Way, until: float) -> None:
        """Has nobody wait for an answer about ``way``, nor its host asked again before ``until``."""
        while len(self._until) >= KEPT:
            del self._until[next(iter(self._until))]
        self._until[way] = until

    def _asking(self, way: Way) -> asyncio.Task[str]:
        if way not in self._asked:
            if len(self._asked) >= KEPT:
                self._asked = {each: asked for each, asked in self._asked.items() if not asked.done()}
            self._asked[way] = asyncio.create_task(self._ask(way))
        return self._asked[way]
