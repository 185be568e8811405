"""A simulated process: the tasks that it runs, which all end when it dies. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from baton.drill.loop import Numbered, SeededLoop

T = TypeVar("T")
OWNER: contextvars.ContextVar[Process | None] = contextvars.ContextVar("owner", default=None)


class Process:
    """Tasks that were begun by ``spawn``, or by tasks of this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in order, so that a run can be repeated

    def spawn(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Begins a task of this process."""
        context = contextvars.copy_context()
        context.run(OWNER.set, self)
        return asyncio.get_running_loop().create_task(work, name=f"{self.name}: {name}", context=context)

    def own(self, task: asyncio.Task[Any]) -> None:
        """Counts a task as this process's."""
        if not self.alive:
            task.cancel()
            return
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    def kill(self) -> None:
        """Ends every task here. What they still do reaches nobody: their connections are gone."""
        self.alive = False
        for task in list(self._tasks):
            task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)


class DrillTask(Numbered, asyncio.Task[T]):
    """A task that tells its loop when it is cancelled. A set of tasks has one order in every run."""

    def cancel(self, msg: Any = None) -> bool:
        """Cancels the task, as any task is."""
        loop = self.get_loop()
        if not self.done() and isinstance(loop, SeededLoop):
            loop.cancelled(self)
        return super().cancel(msg)


def owning_factory(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T] | Generator[Any, None, T],
    context: contextvars.Context | None = None,
) -> asyncio.Task[T]:
    """Makes tasks that belong to the process that begins them."""
    task: asyncio.Task[T] = DrillTask(work, loop=loop, context=context)  # type: ignore[arg-type]
    owner = OWNER.get() if context is None else context.get(OWNER)
    if owner is not None:
        owner.own(task)
    return task
