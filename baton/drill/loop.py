"""An event loop with virtual time, whose order among ready tasks is drawn from a seed.

Time passes only when nothing is ready: it jumps to the next timer. Of the tasks that are ready in one turn, the
next to run is drawn; callbacks that are not tasks keep their order, because asyncio promises it. Knows nothing of
what runs.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from asyncio import base_events
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

RESOLUTION_S = 1e-9
MOST_IDLE_TURNS = 20_000  # turns without time passing after which a run gets nowhere
TASK_STEPS = {"TaskStepMethWrapper", "TaskWakeupMethWrapper"}  # callbacks by which C's tasks go on


# Tasks that may be cancelled twice: choices, whose client leaves as a timer goes off, and handlers of calls,
# which a server that stops ends after their client left.
AGAIN = (" choice ", ": /baton.")


class CancelWitness(Protocol):
    """Hears which coroutines are cancelled; ``coverage.Coverage`` is the real one."""

    def cancelled(self, work: Any) -> None:
        """Notes where a coroutine waits as it is cancelled."""


class _Future(asyncio.Future[Any]):
    """A future that is hashed by its number."""

    def __init__(self, serial: int, **options: Any) -> None:
        self._serial = serial
        super().__init__(**options)

    def __hash__(self) -> int:
        return self._serial


class RunEnds(RuntimeError):
    """Raised out of the loop where a run doesn't go on: the message says why."""


class NothingLeft(RunEnds):
    """Raised when no callback is ready and no timer is set: whatever is still awaited never comes."""


class Halted(RunEnds):
    """Raised in the turn after ``halt``."""


class SeededLoop(base_events.BaseEventLoop):
    """An event loop for one simulated run. It owns no socket and no thread; an executor's work runs in its turn.

    ``reorder`` is the probability with which the tasks that are ready in one turn are shuffled.
    """

    thread_s = 0.002  # seconds that work in a thread takes at most
    again_s = 0.0  # seconds within which whoever is cancelled is cancelled again; 0: nobody is
    limit_s = math.inf  # seconds of virtual time after which a run is ended

    def __init__(self, rng: random.Random, reorder: float = 0.5) -> None:
        super().__init__()
        self.coverage: CancelWitness | None = None
        self.serials = itertools.count()  # by which futures and tasks are hashed
        self._rng, self._reorder, self._now = rng, reorder, 0.0
        self._clock_resolution = RESOLUTION_S
        self._selector = self  # asked by the base class for what is ready outside
        self.turns = self._idle_turns = 0
        self._halted = False

    def halt(self) -> None:
        """Ends the run with the present turn."""
        self._halted = True

    def go_on(self) -> None:
        """Lets the loop run again after its run was ended, for cleaning up."""
        self._halted, self.limit_s, self._idle_turns = False, math.inf, 0

    def create_future(self) -> asyncio.Future[Any]:
        """Returns a future whose place in a set is the same in every run."""
        return _Future(next(self.serials), loop=self)

    def time(self) -> float:
        """Returns the virtual time, in seconds since the loop was made."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Passes ``timeout`` seconds of virtual time. Raises RunEnds where the run is over, or gets nowhere."""
        if self._halted:
            raise Halted("the run was ended")
        if timeout is None:
            raise NothingLeft("no callback is ready and no timer is set")
        self._idle_turns = 0 if timeout > 0 else self._idle_turns + 1
        if self._idle_turns > MOST_IDLE_TURNS:
            raise RunEnds(f"tasks take {MOST_IDLE_TURNS} turns and no time passes")
        self._now += max(0.0, timeout)
        if self._now > self.limit_s:
            raise RunEnds(f"it has not ended after {self.limit_s:g} s")
        self.turns += 1
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        if len(ready) > 1 and self._rng.random() < self._reorder:
            _shuffle_tasks(ready, self._rng)

    def _write_to_self(self) -> None:
        """Does nothing: no thread has to wake this loop."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Runs ``func`` on the loop after a drawn delay, because a thread's result comes at an unknown time."""
        done: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            if done.cancelled():
                return  # a thread that has not begun is never started
            try:
                result = func(*args)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        self.call_later(self._rng.uniform(0.0, self.thread_s), run)
        return done

    def cancelled(self, task: asyncio.Task[Any]) -> None:
        """Hears that a task is cancelled; it may be cancelled again soon, in the middle of its clean-up."""
        if self.coverage is not None:
            self.coverage.cancelled(task.get_coro())
        if self.again_s and any(part in task.get_name() for part in AGAIN):
            self.call_later(self._rng.uniform(0.0, self.again_s), asyncio.Task.cancel, task)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Returns at once: there are no threads."""


def _shuffle_tasks(ready: deque[asyncio.Handle], rng: random.Random) -> None:
    places = [i for i, handle in enumerate(ready) if _is_task_step(handle)]
    if len(places) < 2:
        return
    moved = [ready[i] for i in places]
    rng.shuffle(moved)
    for place, handle in zip(places, moved, strict=True):
        ready[place] = handle


def _is_task_step(handle: asyncio.Handle) -> bool:
    callback = handle._callback  # type: ignore[attr-defined]
    return type(callback).__name__ in TASK_STEPS or getattr(callback, "__qualname__", "") == "Task.task_wakeup"
