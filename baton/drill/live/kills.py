"""Kills given processes under a running server while it is judged, at moments that a seed decides.

Knows nothing of answers. A process that is gone already counts as missed, and nothing else is killed in its place.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence

LOOK_S = 0.01  # seconds between two looks at how many requests were asked


class Kills:
    """Sends SIGKILL to ``pids``, one after another, while a load runs; ``killed`` and ``missing`` list the pids
    that there were and those that had gone before.
    """

    def __init__(self, pids: Sequence[int], rng: random.Random) -> None:
        self._pids, self._rng = tuple(pids), rng
        self.killed: list[int] = []
        self.missing: list[int] = []

    async def play(self, asked: Callable[[], int], load: int) -> None:
        """Kills each process once a drawn number of the ``load`` requests was asked; ``asked`` counts them."""
        moments = sorted(self._rng.uniform(0.2, 0.8) * load for _ in self._pids)
        first = asked()
        for moment, pid in zip(moments, self._pids, strict=True):
            while asked() - first < moment:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            self._kill(pid)

    def _kill(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            self.missing.append(pid)
        else:
            self.killed.append(pid)
