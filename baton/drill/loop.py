"""An asyncio event loop in virtual time that draws the order of ready tasks from a seed.

Knows nothing of what runs. Time advances only when no callback is ready: it jumps to the next timer. The tasks that
are ready in one turn run in random order; other callbacks keep their order, because asyncio promises that.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from asyncio import base_events
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from types import BuiltinFunctionType
from typing import Any, Protocol, TypeVar, TypeVarTuple, cast

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Seconds within which timers are due together, because sums of floats differ in their last bits.
RESOLUTION_S = 1e-9
MOST_CANCELLED = 100  # timers that were cancelled and still wait for their time, beside as many others
MOST_IDLE_TURNS = 20_000  # turns without time passing after which a run gets nowhere
TASK_STEPS = {"TaskStepMethWrapper", "TaskWakeupMethWrapper"}  # callbacks by which C's tasks go on
STEP_TYPES: dict[type, bool] = {}  # by type of callback: whether it is one of those
TaskStep = tuple[Callable[..., object], tuple[object, ...], Context]  # by which a task goes on in a turn


# Tasks that may be cancelled twice: choices, whose client leaves as a timer goes off, and handlers of calls,
# which a server that stops ends after their client left.
AGAIN = (" choice ", ": /baton.")


class CancelWitness(Protocol):
    """The interface by which the loop reports cancelled coroutines; ``coverage.Coverage`` implements it."""

    def cancelled(self, work: object) -> None:
        """Receives the coroutine of a task that is about to be cancelled."""


class StableHash:
    """Hashes futures and tasks by a number from their loop, so that sets of them have the same order in every
    run.
    """

    _number = 0

    def __hash__(self) -> int:
        if not self._number:
            loop = self.get_loop()  # type: ignore[attr-defined]
            self._number = next(loop.numbers)
        return self._number


class _Future(StableHash, asyncio.Future[Any]):
    """A future of a simulated run."""


def _nothing() -> None:
    """Stands for a callback that was cancelled."""


class SeededTimer(asyncio.TimerHandle):
    """A callback that is ready or waits for its time; it has fewer attributes than asyncio's, because a run makes
    so many.
    """

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[object, ...],
        loop: SeededLoop,
        context: Context | None,
    ) -> None:
        self._when, self._callback, self._args, self._loop = when, callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled, self._scheduled = False, False

    def cancel(self) -> None:
        """Drops the callback, so that it never runs."""
        if not self._cancelled:
            self._cancelled = True
            self._callback, self._args = _nothing, ()
            if self._scheduled:
                self._loop.timer_cancelled()


class Arrival(SeededTimer):
    """The arrival of a message, which doesn't wait for whoever sent it or gets it."""

    __slots__ = ()


class RunEnds(RuntimeError):
    """Raised by the loop when a run cannot or must not continue; the message says why."""


class NothingLeft(RunEnds):
    """Raised when no callback is ready and no timer is set, so that whatever is still awaited never comes."""


class Halted(RunEnds):
    """Raised in the turn after ``SeededLoop.halt`` was called."""


class SeededLoop(base_events.BaseEventLoop):
    """An event loop in virtual time for one simulated run, without sockets and threads: executors' work runs in its
    turns.

    ``reorder`` is the probability with which the tasks that are ready in one turn are shuffled. Running it raises
    RunEnds when the run is stuck or past ``limit_s``.
    """

    thread_s = 0.002  # seconds that work in a thread takes at most
    again_s = 0.0  # seconds within which whoever is cancelled is cancelled again; 0: nobody is
    _stopping: bool  # the base class's: whether this is the last turn
    limit_s = math.inf  # seconds of virtual time after which a run is ended

    def __init__(self, rng: random.Random, reorder: float = 0.5) -> None:
        super().__init__()
        self.coverage: CancelWitness | None = None
        self.numbers = itertools.count(1)  # by which futures and tasks are hashed
        self._rng, self._reorder, self._now = rng, reorder, 0.0
        self._callbacks: deque[SeededTimer | TaskStep] = deque()
        self._timers: list[tuple[float, int, SeededTimer]] = []
        self._timer_numbers = itertools.count()
        self._timers_cancelled = 0
        self._dropped = SeededTimer(0.0, _nothing, (), self, None)  # what C's tasks get, who drop it
        self.turns = self._idle_turns = 0
        self._halted = False
        # Tells of the context of a callback whether its process stands still; None: no process does.
        self._stands: Callable[[Context], bool] | None = None
        self._kept_back: deque[SeededTimer | TaskStep] = deque()

    def halt(self) -> None:
        """Ends the run after the present turn, by raising Halted."""
        self._halted = True

    def go_on(self) -> None:
        """Lets the loop run again after RunEnds was raised, without a time limit, for cleaning up."""
        self._halted, self.limit_s, self._idle_turns, self._stands = False, math.inf, 0, None
        self.bring_back()

    def create_future(self) -> asyncio.Future[Any]:
        """Returns a future whose position in sets is the same in every run."""
        return _Future(loop=self)

    def time(self) -> float:
        """Returns the virtual time, in seconds since the loop was made."""
        return self._now

    def true_time(self) -> float:
        """Returns the virtual time, whatever the clocks of simulated machines show."""
        return self._now

    # ---- callbacks, in place of the base class's ----

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedules ``callback`` for the next turn; returns its handle, by which it can be cancelled."""
        if context is not None and (STEP_TYPES.get(type(callback)) or _is_task_step(callback)):
            self._callbacks.append((callback, args, context))
            return self._dropped
        handle = SeededTimer(self._now, callback, args, self, context)
        self._callbacks.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedules ``callback`` for the next turn, as ``call_soon`` does; asyncio calls this for finalizers of
        generators.
        """
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedules ``callback`` after ``delay`` seconds of virtual time; returns its handle."""
        return self.call_at_true(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedules ``callback`` for the virtual time ``when`` (seconds); returns its handle."""
        return self.call_at_true(when, callback, *args, context=context)

    def call_at_true(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedules ``callback`` for the virtual time ``when``, whatever the clocks of simulated machines show."""
        handle = SeededTimer(when, callback, args, self, context)
        handle._scheduled = True
        heapq.heappush(self._timers, (when, next(self._timer_numbers), handle))
        return handle

    def arrives_at(self, when: float, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Schedules ``callback``, which brings a message, for the virtual time ``when``."""
        handle = Arrival(when, callback, args, self, None)
        handle._scheduled = True
        heapq.heappush(self._timers, (when, next(self._timer_numbers), handle))

    def timer_cancelled(self) -> None:
        """Counts a cancelled timer, and removes all cancelled timers once they are over half of all."""
        self._timers_cancelled += 1
        if self._timers_cancelled > MOST_CANCELLED and 2 * self._timers_cancelled > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def _run_once(self) -> None:
        """Runs turns until the loop stops: advances time if no callback is ready, then runs each ready callback
        once.
        """
        ready, draw, reorder = self._callbacks, self._rng.random, self._reorder
        while True:
            self._gather()
            if len(ready) > 1 and draw() < reorder:
                _shuffle_tasks(ready, self._rng)
            for _ in range(len(ready)):
                entry = ready.popleft()
                try:
                    if isinstance(entry, tuple):
                        callback, args, context = entry
                        context.run(callback, *args)
                    elif not entry._cancelled:
                        entry._context.run(entry._callback, *entry._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"{entry!r} failed", "exception": error})
            if self._stopping:
                return

    def _gather(self) -> None:
        """Begins a turn: advances time if no callback is ready, and makes those ready whose time has come.

        Raises Halted after ``halt``, NothingLeft if nothing is ever ready again, RunEnds past ``limit_s`` and after
        MOST_IDLE_TURNS turns in which no time passed.
        """
        ready, timers = self._callbacks, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self._timers_cancelled -= 1
        if not ready and not self._stopping:
            self._pass_time(timers[0][0] if timers else None)
        if self._halted:
            raise Halted("the run was ended")
        self.turns += 1
        self._idle_turns += 1
        if self._idle_turns > MOST_IDLE_TURNS:
            raise RunEnds(f"tasks take {MOST_IDLE_TURNS} turns and no time passes")
        until = self._now + RESOLUTION_S
        while timers and timers[0][0] < until:
            handle = heapq.heappop(timers)[2]
            handle._scheduled = False
            if handle._cancelled:
                self._timers_cancelled -= 1
            else:
                ready.append(handle)
        if self._stands is not None:
            self._keep_back(self._stands)

    def keep_back(self, stands: Callable[[Context], bool]) -> None:
        """Keeps callbacks back, from the next turn on, as long as ``stands`` says of their context that its process
        stands still.
        """
        self._stands = stands

    def bring_back(self) -> None:
        """Makes ready what was kept back, in its order and before what came since: somebody may go on now."""
        self._callbacks.extendleft(reversed(self._kept_back))
        self._kept_back.clear()

    def _keep_back(self, stands: Callable[[Context], bool]) -> None:
        """Takes the callbacks of processes that stand still from those that are ready."""
        ready = self._callbacks
        for _ in range(len(ready)):
            entry = ready.popleft()
            context = entry[2] if isinstance(entry, tuple) else entry._context
            waits = not isinstance(entry, Arrival) and stands(context)
            (self._kept_back if waits else ready).append(entry)

    def _pass_time(self, until: float | None) -> None:
        """Advances the virtual time to ``until``; None: no timer is set."""
        if until is None:
            raise NothingLeft("no callback is ready and no timer is set")
        if until > self._now:
            self._now, self._idle_turns = until, 0
        if self._now > self.limit_s:
            raise RunEnds(f"it has not ended after {self.limit_s:g} s")

    def _process_events(self, event_list: list[object]) -> None:
        """Does nothing, because the loop has no sockets."""

    def _write_to_self(self) -> None:
        """Does nothing, because there is no other thread that would wake this loop."""

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: object) -> asyncio.Future[T]:  # type: ignore[override]
        """Runs ``func`` on the loop after a random delay of at most ``thread_s``, and returns a future of its
        result.
        """
        done: asyncio.Future[T] = self.create_future()

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

    def cancelled(self, task: asyncio.Task[T]) -> None:
        """Reports ``task``, about to be cancelled, to the coverage; while ``again_s`` is set, also cancels it once
        more soon.
        """
        if self.coverage is not None:
            self.coverage.cancelled(task.get_coro())
        if self.again_s and any(part in task.get_name() for part in AGAIN):
            self.call_later(self._rng.uniform(0.0, self.again_s), asyncio.Task.cancel, task)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Returns at once, because there are no threads."""


def seeded_loop() -> SeededLoop:
    """Returns the running event loop, which is a simulated run's."""
    return cast(SeededLoop, asyncio.get_running_loop())


def _shuffle_tasks(ready: deque[SeededTimer | TaskStep], rng: random.Random) -> None:
    places = [i for i, entry in enumerate(ready) if type(entry) is tuple]
    if len(places) < 2:
        return
    moved = [ready[i] for i in places]
    rng.shuffle(moved)
    for place, entry in zip(places, moved, strict=True):
        ready[place] = entry


def _is_task_step(callback: Callable[..., object]) -> bool:
    """Returns whether ``callback`` is one by which C's tasks go on."""
    kind = type(callback)
    if kind is BuiltinFunctionType:
        return callback.__name__ == "task_wakeup"
    is_step = STEP_TYPES.get(kind)
    if is_step is None:
        is_step = STEP_TYPES[kind] = kind.__name__ in TASK_STEPS
    return is_step
