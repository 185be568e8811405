"""A simulated worker: a slot, which is filled by one life after another.

Knows nothing of what a life does. The slot starts the next one when one ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.drill.parts.life import Life
from baton.drill.parts.slot import Slot
from baton.drill.parts.tier import damage

RESTART_S = 1.0  # seconds after which a worker that ended is started again


@dataclass(eq=False)
class SimulatedWorker(Slot):
    """A worker slot: runs one life at a time, and starts the next when it ends."""

    life: Life | None = field(default=None, init=False)
    dead: list[Life] = field(default_factory=list, init=False)
    held_back_until: float = field(default=0.0, init=False)  # loop time before which no life starts
    placed: bool = field(default=False, init=False)
    _lives: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)
    _living: asyncio.Task[None] | None = field(default=None, init=False)

    def start(self) -> None:
        """Starts the first life; from now on each life is followed by the next."""
        self.placed = True
        if self._living is None or self._living.done():
            nobodys = contextvars.Context()  # whoever starts it may end before it
            self._living = asyncio.get_running_loop().create_task(self._live(), context=nobodys)

    def place(self, role: str) -> None:
        """Starts the worker as one of ``role``; one that still drains is started again once it has left."""
        self.role = role
        self.start()

    def displace(self) -> None:
        """Has the present life drain and leave, and starts no other."""
        self.placed = False
        if self.life is not None:
            self.life.stop.set()

    def stop(self) -> None:
        """Kills the present life, and starts no other."""
        self.placed = False
        if self._living is not None:
            self._living.cancel()
        self.kill()

    def upgrade(self) -> None:
        """Has later lives use other weights or, where KV is floats, keep it otherwise."""
        if any(kind.dtype for kind in self.scenario.page_kinds):
            self.changes += 1
        else:
            self.weights ^= 1

    def kill(self, held_back_s: float = 0.0, crash: bool = False) -> None:
        """Kills the present life abruptly; the next starts ``held_back_s`` seconds later than usual. In a ``crash``
        of the machine its disk tier is damaged.
        """
        self.held_back_until = asyncio.get_running_loop().time() + held_back_s
        if self.life is not None:
            self.life.kill()
        if crash and (self.disks / self.slot).is_dir():
            damage(self.disks / self.slot, self.rng)

    async def _live(self) -> None:
        while self.placed:
            self.life = life = Life(self, next(self._lives))
            self.tell(self.slot, f"starts as {life.incarnation}")
            why = await life.begin()
            self.tell(self.slot, f"ended: {why}")
            self.life, self.role = None, life.role
            self.dead.append(life)
            await asyncio.sleep(RESTART_S + max(0.0, self.held_back_until - asyncio.get_running_loop().time()))
