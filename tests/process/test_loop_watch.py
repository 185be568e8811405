"""The watch over an event loop: it sees what this process does to its loop, and nothing that others do."""

import asyncio
import random
import subprocess
import sys
import threading
import time
from types import FrameType

import pytest
import uvloop

from baton.process import loop_watch
from baton.process.loop_watch import LoopWatch
from tests.thorough import later

pytestmark = pytest.mark.usefixtures("settled_heap")


def spin(seconds: float) -> None:
    """CPU of this thread, however busy the machine is."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def watched(work, stall_s: float = 0.05) -> LoopWatch:
    noticed: list[float] = []
    with LoopWatch(stall_s, noticed.append) as watch:
        await asyncio.sleep(2 * stall_s)
        await work()
        await asyncio.sleep(3 * stall_s)
    assert len(noticed) == len(watch.stalls)
    return watch


@pytest.mark.parametrize("run", [uvloop.run, later(asyncio.run)], ids=["uvloop", "asyncio"])
def test_a_callback_that_holds_the_loop_is_seen_with_its_stack(run, caplog) -> None:
    async def work() -> None:
        spin(0.25)

    watch = run(watched(work))
    # a watch that waits for a core itself tells of one hold in parts, or misses its end
    assert any(0.05 <= stall.seconds < 1 and "spin" in stall.stack for stall in watch.stalls)
    assert "stood still" in caplog.text


@pytest.mark.parametrize("in_thread", [True, later(False)], ids=["in another thread", "on the loop"])
def test_code_in_c_that_holds_the_interpreters_lock_is_seen_too(in_thread: bool) -> None:
    numbers = list(range(1 << 19))
    random.Random(1).shuffle(numbers)

    async def work(watch: LoopWatch) -> None:
        end = time.monotonic() + 60.0
        while time.monotonic() < end:  # on a busy machine, the watch may look too late to tell
            if in_thread:
                await asyncio.to_thread(sorted, numbers)
            else:
                sorted(numbers)
            await asyncio.sleep(0.02)
            if watch.stalls:
                return

    async def run() -> LoopWatch:
        with LoopWatch(0.05) as watch:
            await work(watch)
        return watch

    assert asyncio.run(run()).stalls


def test_many_short_callbacks_in_a_row_are_no_stall() -> None:
    async def work() -> None:
        await asyncio.gather(*(one() for _ in range(60)))

    async def one() -> None:
        spin(0.005)

    assert not uvloop.run(watched(work)).stalls


def test_the_watchs_own_looks_are_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes the core from the watch while it holds the interpreter's lock, and the loop waits."""
    real, looks = loop_watch._stack, list[int]()

    def slow(frame: FrameType | None) -> str:
        looks.append(1)
        spin(0.02)
        return real(frame)

    async def work() -> None:
        await asyncio.gather(*(one() for _ in range(30)))

    async def one() -> None:
        spin(0.005)

    monkeypatch.setattr(loop_watch, "_stack", slow)
    assert not uvloop.run(watched(work)).stalls
    assert looks


def test_a_look_that_gives_the_interpreters_lock_away_often_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are read for a stack, and each time the loop runs on until the lock is given back."""
    real, looks = loop_watch._stack, list[int]()

    def reading(frame: FrameType | None) -> str:
        looks.append(1)
        for _ in range(20):
            time.sleep(0)  # waits for the lock, for as long as a thread may keep it
        return real(frame)

    async def work() -> None:
        await asyncio.gather(*(one() for _ in range(60)))

    async def one() -> None:
        spin(0.005)

    monkeypatch.setattr(loop_watch, "_stack", reading)
    assert not uvloop.run(watched(work)).stalls
    assert looks


def test_a_busy_machine_is_no_stall() -> None:
    busy = [sys.executable, "-c", "while True: pass"]
    neighbours = [subprocess.Popen(busy) for _ in range(8)]
    try:

        async def work() -> None:
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                spin(0.002)
                await asyncio.sleep(0)

        assert not uvloop.run(watched(work)).stalls
    finally:
        for one in neighbours:
            one.kill()
            one.wait()


def test_an_idle_loop_is_no_stall_and_the_watch_ends_with_its_block() -> None:
    before = threading.active_count()

    async def work() -> None:
        await asyncio.sleep(0.2)

    assert not asyncio.run(watched(work)).stalls
    assert threading.active_count() <= before + 1  # asyncio's own executor
