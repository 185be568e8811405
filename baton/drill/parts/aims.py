"""Tells which worker has begun which phase of which request, and which process a phase of its own.

Knows nothing of faults, or of workers' parts.
"""

from __future__ import annotations

import asyncio

from baton.drill.scenario import AIM_S, Phase


class Aims:
    """The phases that a run's requests have reached, each with the slot of the first worker that reached it.

    A phase of OF_PROCESSES is one of a worker or a router, whose name is the number and the slot.
    """

    def __init__(self) -> None:
        self._reached: dict[tuple[int | str, Phase], str] = {}
        self._waiting: dict[tuple[int | str, Phase], asyncio.Future[None]] = {}

    def reached(self, number: int | str, phase: Phase, slot: str) -> None:
        """Stores that worker ``slot`` is in ``phase`` of request ``number``; only the first one counts."""
        if (number, phase) in self._reached:
            return
        self._reached[number, phase] = slot
        if (waiting := self._waiting.pop((number, phase), None)) is not None and not waiting.done():
            waiting.set_result(None)

    def who(self, number: int | str, phase: Phase) -> str:
        """Returns the slot of the worker that reached ``phase`` of request ``number`` first, "" for none."""
        return self._reached.get((number, phase), "")

    async def wait(self, number: int | str, phase: Phase) -> str:
        """Waits until a worker is in ``phase`` of request ``number``, for AIM_S at most; returns its slot or ""."""
        key = number, phase
        if key not in self._reached:
            waiting = self._waiting.setdefault(key, asyncio.get_running_loop().create_future())
            await asyncio.wait({waiting}, timeout=AIM_S)
        return self.who(number, phase)
