"""A scenario played again and again, cancelled each time at another await, and again while it cleans up.

``enumerate_cancels(scenario)`` plays it once for each suspension of any of its tasks. A scenario is an async
context manager that gives a ``Play``: the work that is cancelled, and what must hold afterwards. Of all of them it
is held that the work ends, as cancelled or as it would have; that no task is left, none was destroyed, and no
exception went unheard; and, where the play has pages, that nobody writes to one after it was given back.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool

PATIENCE_S = 20.0
TICKS = 20  # in which work ends that waits for nobody else
POISON = 0xA5


class How(NamedTuple):
    """Describes ``times`` cancels: the first at a suspension, the others at the work's next ones, or ``apart``
    ticks later.
    """

    times: int
    apart: int = 0


ONCE, TWICE, THRICE = How(1), How(2), How(3)
TICKS_LATER = How(2, 2)  # by then the work has heard of the first
ALL = (ONCE, TWICE, TICKS_LATER, THRICE)


class Gate:
    """Holds up threads: a call passes when the event loop lets it, and none does while the gate is shut."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[threading.Event] = []
        self._shut = False

    def shut(self) -> None:
        """Lets nobody pass from now on."""
        self._shut = True

    def open(self) -> None:
        """Lets those who wait pass, and all who come later."""
        self._shut = False
        while self._waiting:
            self._waiting.pop().set()

    def before(self, of: Any, name: str) -> None:
        """Calls of ``of.name`` on a thread pass here first."""
        act = getattr(of, name)

        def passing(*args: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                leave = threading.Event()
                self._loop.call_soon_threadsafe(self._asked, leave)
                assert leave.wait(PATIENCE_S), "nobody opened the gate"
            return act(*args)

        setattr(of, name, passing)

    def _asked(self, leave: threading.Event) -> None:
        if self._shut:
            self._waiting.append(leave)
        else:
            leave.set()


class Guard:
    """The pages that are free now, filled with poison until ``check``."""

    def __init__(self, pool: PagePool, memory: PageMemory) -> None:
        self._pool, self._memory, self._pages = pool, memory, tuple(pool.supply.free)
        self._poison = bytes([POISON]) * memory.page_bytes
        for page in self._pages:
            memory.page(page)[:] = self._poison

    def check(self) -> None:
        """Assert that nobody wrote there."""
        free = set(self._pool.supply.free)
        written = [p for p in self._pages if p in free and bytes(self._memory.page(p)) != self._poison]
        assert not written, f"pages {written} were written after they had been given back"


class Play(NamedTuple):
    """``work`` is what gets cancelled. ``at_rest`` waits for what must hold then, or raises AssertionError."""

    work: Callable[[], Coroutine[Any, Any, Any]]
    at_rest: Callable[[], Awaitable[None]]
    gate: Gate | None = None
    guarded: Sequence[tuple[PagePool, PageMemory]] = ()
    begin: Callable[[], asyncio.Task[Any]] | None = None  # instead of ``work``: its task is made by what is tested


Scenario = Callable[[], AbstractAsyncContextManager[Play]]


class Strikes:
    """Counts all tasks' suspensions from the work's start on; cancels the work at the ``at``-th, and again."""

    def __init__(self, at: int, how: How, first: Callable[[], None]) -> None:
        self.suspensions = self.cancels = 0
        self.work: asyncio.Task[Any] | None = None
        self.place = ""
        self._at, self._how, self._first = at, how, first

    def started(self, work: asyncio.Task[Any]) -> None:
        """This is what gets cancelled."""
        self.work = work

    def suspended(self, inner: Any, task: asyncio.Task[Any] | None) -> None:
        """Counts a suspension of the watched work, and cancels it if its turn has come."""
        if self.work is None or self.work.done():
            return
        self.suspensions += 1
        if not self.cancels and self.suspensions >= self._at:
            self.place = where(inner)
            self._first()
            self._cancel()
            if self._how.apart:
                self._cancel_in(self._how.apart)
        elif self.cancels and not self._how.apart and task is self.work:
            self._cancel()

    def _cancel_in(self, ticks: int) -> None:
        if ticks:
            asyncio.get_running_loop().call_soon(self._cancel_in, ticks - 1)
        else:
            self._cancel()

    def _cancel(self) -> None:
        if self.cancels < self._how.times and self.work is not None:
            self.cancels += 1
            self.work.cancel()


class Counted(Coroutine[Any, Any, Any]):
    """A task's coroutine whose suspensions are told."""

    def __init__(self, inner: Any, strikes: Strikes) -> None:
        self._inner, self._strikes = inner, strikes

    def send(self, value: Any) -> Any:
        return self._told(self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        return self._told(self._inner.throw(*error))

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, None, Any]:
        return (yield from self._inner.__await__())

    def _told(self, future: Any) -> Any:
        self._strikes.suspended(self._inner, asyncio.current_task())
        return future


def where(inner: Any) -> str:
    """The innermost lines of ours at which a coroutine waits."""
    lines = []
    while inner is not None:
        frame = (
            getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None) or getattr(inner, "gi_frame", None)
        )
        if frame is not None and "/baton/" in frame.f_code.co_filename:
            lines.append(f"{frame.f_code.co_filename.rpartition('/baton/')[2]}:{frame.f_lineno}")
        inner = (
            getattr(inner, "cr_await", None)
            or getattr(inner, "ag_await", None)
            or getattr(inner, "gi_yieldfrom", None)
        )
    return " > ".join(lines)


async def played(scenario: Scenario, at: int, how: How) -> bool:
    """Play it once, cancelled at its ``at``-th suspension; whether there was one."""
    loop, before, complaints = asyncio.get_running_loop(), asyncio.all_tasks(), list[str]()
    gate: Gate | None = None
    strikes = Strikes(at, how, lambda: gate.shut() if gate else None)
    loop.set_exception_handler(lambda _, context: None if foreign(context) else complaints.append(told(context)))
    loop.set_task_factory(lambda loop, coro, **named: asyncio.Task(Counted(coro, strikes), loop=loop, **named))
    try:
        async with scenario() as play:
            gate = play.gate
            await _cancelled(play, strikes)
        del play
        await _nothing_left(before, complaints)
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{how} at suspension {at} ({strikes.place}): {error}") from error
    finally:
        loop.set_exception_handler(None)
        loop.set_task_factory(None)
    return bool(strikes.cancels)


def told(context: dict[str, Any]) -> str:
    """Returns what the event loop says of an exception that nobody heard."""
    return f"{context['message']}: {context}"


def foreign(context: dict[str, Any]) -> bool:
    """Returns whether gRPC had an event for an event loop that is closed, so of an earlier test.

    gRPC's one queue per process hands each event to the loop of its call through whichever loop reads the queue.
    The loop of this play is open while it is played: "closed" can't be said of a call that the play made.
    """
    handle, error = context.get("handle"), context.get("exception")
    return "PollerCompletionQueue" in repr(handle) and str(error) == "Event loop is closed"


async def _cancelled(play: Play, strikes: Strikes) -> None:
    work = asyncio.get_running_loop().create_task(play.work()) if play.begin is None else play.begin()
    strikes.started(work)
    while not work.done() and not strikes.cancels:
        await asyncio.sleep(0)
    for _ in range(TICKS):
        await asyncio.sleep(0)
    guards = [Guard(*pages) for pages in play.guarded]
    if play.gate:
        play.gate.open()
    await asyncio.wait({work}, timeout=PATIENCE_S)
    assert work.done(), "it does not end"
    if not work.cancelled() and (error := work.exception()) is not None:
        raise AssertionError(f"it ended by {error!r}") from error
    await play.at_rest()
    for guard in guards:
        guard.check()


async def _nothing_left(before: set[asyncio.Task[Any]], complaints: list[str]) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while left := asyncio.all_tasks() - before:
        assert asyncio.get_running_loop().time() < deadline, f"{left} are left"
        await asyncio.sleep(0.001)
    gc.collect()
    await asyncio.sleep(0)
    assert not complaints, f"{complaints}"


async def enumerate_cancels(scenario: Scenario, how: Sequence[How] = ALL, every: int = 1) -> int:
    """Play ``scenario`` cancelled at each (or each ``every``-th) suspension in each way; how many plays it took."""
    gc.collect()
    gc.freeze()  # what was here before need not be looked through after each play
    plays = 0
    for way in how:
        at = 1
        while await played(scenario, at, way):
            plays, at = plays + 1, at + every
    return plays
