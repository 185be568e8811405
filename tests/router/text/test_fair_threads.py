"""Threads that tenants share: whose work begins when one comes free, and what a caller that leaves gives up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from baton.router.access.caller import CALLER, Caller
from baton.router.access.keys import ApiKey
from baton.router.text.chat_template import PLAIN, ChatTemplate
from baton.router.text.fair_threads import FairThreads
from baton.router.text.model import TextModel
from baton.router.text.tokenizer import ByteTokenizer
from tests.cancels import ALL, Gate, Play, enumerate_cancels

PATIENCE_S = 20.0


class Works:
    """Makes work that says when it begins and waits until it is let go."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun: asyncio.Queue[str] = asyncio.Queue()
        self._doors: dict[str, threading.Event] = {}

    def of(self, name: str) -> Callable[[], str]:
        self._doors[name] = threading.Event()
        return partial(self.at, name)

    def at(self, name: str) -> str:
        """Does the work, on a thread: begins and waits."""
        self._loop.call_soon_threadsafe(self._begun.put_nowait, name)
        assert self._doors[name].wait(PATIENCE_S)
        return name

    def end(self, *names: str) -> None:
        for name in names:
            self._doors[name].set()

    async def begun(self) -> str:
        """Returns the name of the next work that begins."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._begun.get()

    @property
    def none_more(self) -> bool:
        return self._begun.empty()


async def test_a_thread_that_comes_free_goes_to_the_tenant_that_has_none() -> None:
    threads, works = FairThreads(2, "fair"), Works()
    many = [asyncio.create_task(threads.run("a", works.of(f"a{i}"))) for i in range(6)]
    assert {await works.begun(), await works.begun()} == {"a0", "a1"}  # a tenant alone has both
    other = asyncio.create_task(threads.run("b", works.of("b0")))
    third = asyncio.create_task(threads.run("c", works.of("c0")))
    await asyncio.sleep(0)
    assert works.none_more
    works.end("a0")
    assert await works.begun() == "b0"
    works.end("a1")
    assert await works.begun() == "a2"  # its turn came before
    works.end("b0")
    assert await works.begun() == "c0"
    works.end("c0", *(f"a{i}" for i in range(2, 6)))
    assert await asyncio.gather(*many, other, third) == [*(f"a{i}" for i in range(6)), "b0", "c0"]


async def test_long_prompts_take_turns_by_their_callers_tenants() -> None:
    works = Works()

    class Slow(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [len(works.at(text[0]))]

    model = TextModel(Slow(256), ChatTemplate(PLAIN))

    async def ask(tenant: str, name: str) -> None:
        works.of(name)
        CALLER.set(Caller(key=ApiKey("k", tenant, "h")))
        await model.encode(name * 10_000)

    async with asyncio.TaskGroup() as scope:
        for name in "abcdef":
            scope.create_task(ask("one", name))
        assert {await works.begun(), await works.begun()} == {"a", "b"}
        scope.create_task(ask("another", "x"))
        await asyncio.sleep(0)
        works.end("a")
        assert await works.begun() == "x"
        works.end(*"bcdefx")


async def test_who_leaves_the_line_is_passed_over_and_what_runs_keeps_its_thread() -> None:
    threads, works = FairThreads(1, "fair"), Works()
    running, waiting, last = (asyncio.create_task(threads.run("a", works.of(name))) for name in "xyz")
    assert await works.begun() == "x"
    for task in (running, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(threads._turns) == 1  # what waits still; the caller that left holds no text
    assert works.none_more  # the thread computes on
    works.end("x", "z")
    assert await works.begun() == "z"
    assert await last == "z"


async def test_an_error_reaches_the_caller_and_the_thread_goes_on() -> None:
    threads, works = FairThreads(1, "fair"), Works()

    def failing() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await threads.run("a", failing)
    works_on = asyncio.create_task(threads.run("a", works.of("y")))
    assert await works.begun() == "y"
    works.end("y")
    assert await works_on == "y"


@asynccontextmanager
async def in_line() -> AsyncIterator[Play]:
    """A caller behind another one's work; the thread passes a gate."""

    class Work:
        def do(self) -> int:
            return 1

    threads, gate, work = FairThreads(1, "fair"), Gate(), Work()
    gate.before(work, "do")
    first = asyncio.create_task(threads.run("a", work.do))

    async def at_rest() -> None:
        await first
        assert await threads.run("c", work.do) == 1  # the thread is free
        assert (len(threads._turns), threads._turns._running) == (0, {})

    yield Play(lambda: threads.run("b", work.do), at_rest, gate)


async def test_a_caller_that_is_cancelled_anywhere_leaves_nothing_in_the_line() -> None:
    assert await enumerate_cancels(in_line) >= len(ALL)


def test_several_event_loops_may_share_the_threads() -> None:
    threads = FairThreads(1, "fair")
    assert [asyncio.run(threads.run("a", lambda: 1)) for _ in range(3)] == [1, 1, 1]
