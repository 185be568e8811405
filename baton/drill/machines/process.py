"""A simulated process: a set of tasks which all end when it dies. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from baton.drill.loop import SeededLoop, StableHash, seeded_loop
from baton.drill.machines.clock import CLOCK, MachineClock

T = TypeVar("T")
OWNER: contextvars.ContextVar[Process | None] = contextvars.ContextVar("owner", default=None)


class Process:
    """The tasks that were started by ``spawn``, or by other tasks of this process, on a machine with ``clock``."""

    def __init__(self, name: str, clock: MachineClock | None = None) -> None:
        self.name, self._clock = name, clock
        self.alive = True
        self._stands = 0  # times that it was made to stand still and not yet to go on
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in order, so that a run can be repeated

    def spawn(self, work: Coroutine[object, None, T], name: str = "") -> asyncio.Task[T]:
        """Starts ``work`` as a task of this process and returns the task."""
        context = contextvars.copy_context()
        context.run(OWNER.set, self)
        context.run(CLOCK.set, self._clock)
        return asyncio.get_running_loop().create_task(work, name=f"{self.name}: {name}", context=context)

    def own(self, task: asyncio.Task[T]) -> None:
        """Adds ``task`` to this process's tasks; cancels it if the process is dead."""
        if not self.alive:
            task.cancel()
            return
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    def kill(self) -> None:
        """Marks the process as dead and cancels all its tasks."""
        self.alive = False
        if self._stands:
            seeded_loop().bring_back()
        for task in list(self._tasks):
            task.cancel()

    @property
    def stands(self) -> bool:
        """Returns whether the process stands still."""
        return self._stands > 0 and self.alive

    def stand(self) -> None:
        """Has the process stand still: none of its tasks and timers goes on, and messages to it wait.

        What it has sent arrives, and its connections stay.
        """
        self._stands += 1
        seeded_loop().keep_back(_stands)

    def go_on(self) -> None:
        """Ends one ``stand``; after the last the process goes on."""
        self._stands -= 1
        seeded_loop().bring_back()

    def _forget(self, task: asyncio.Task[T]) -> None:
        self._tasks.pop(task, None)


def _stands(context: contextvars.Context) -> bool:
    owner = context.get(OWNER)
    return owner is not None and owner.stands


class DrillTask(StableHash, asyncio.Task[T]):
    """A task that tells its loop before it is cancelled; sets of such tasks have the same order in every run."""

    def cancel(self, msg: object = None) -> bool:
        """Cancels the task, as asyncio does, after telling the loop; returns False if it was done."""
        loop = self.get_loop()
        if not self.done() and isinstance(loop, SeededLoop):
            loop.cancelled(self)
        return super().cancel(msg)


def owning_factory(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[object, None, T] | Generator[object, None, T],
    context: contextvars.Context | None = None,
) -> asyncio.Task[T]:
    """Returns a new task of ``work`` that belongs to the simulated process whose code started it, if there is
    one.
    """
    task: asyncio.Task[T] = DrillTask(work, loop=loop, context=context)  # type: ignore[arg-type]
    owner = OWNER.get() if context is None else context.get(OWNER)
    if owner is not None:
        owner.own(task)
    return task
