"""Measures how much copies between KV tiers slow down decode steps that run in another process at the same time.

Knows nothing of how long lifting takes. The step is that of the demo model on one thread; what is copied are pages
of another model's size, again and again, at the pace that a decode worker keeps. A pair is two short windows, one
with copying and one without, whose order alternates; a figure is the median over all pairs of the ratio of the two
windows' mean steps, with the interval that holds the true median in 95 of 100 runs. The mean is used because a copy
slows some steps only, which a median of steps would not show.

Wall time of a step also includes waiting for a core that others use. Its thread's CPU time leaves that out and
includes waiting for memory, so it is the better figure on a busy machine.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from baton.bench.rows import Row, interval, median
from baton.cluster.served_model import DEMO
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.kv.memory.host_pages import PageMemory
from baton.protos.nouns import BLOCK_TOKENS, Sampling

TARGET = 2.0  # percent
PAIRS = 8  # for each of the other rows' rounds

Ask = Callable[[], "StepMeans"]


class StepMeans(NamedTuple):
    """Mean durations of the decode steps of one window, in seconds."""

    wall: float
    cpu: float  # CPU time of the thread


class WindowPair(NamedTuple):
    """The means of two windows, one without copying (``alone``) and one with (``beside``), measured one after the
    other.
    """

    alone: StepMeans
    beside: StepMeans


def decode_steps(sequences: int = 8, context: int = 512) -> None:
    """Runs decode steps until stdin ends; for each line on stdin it prints the mean wall and CPU seconds since the
    last.

    This is the main function of the child process.
    """
    runner = load_runner(EngineConfig(model=str(DEMO), threads=1))
    per = context // BLOCK_TOKENS + 1
    memory = PageMemory.create(sequences * per, runner.spec.layout.page_bytes)
    runner.bind(memory.view(), sequences * per)
    sampling, history = Sampling(temperature=0.0, max_tokens=8), [7] * context
    items = tuple(
        SequenceStep(
            i, [7], context, list(range(i * per, (i + 1) * per)), SampleSpec(sampling, 0, context, history, 1)
        )
        for i in range(sequences)
    )
    os.set_blocking(sys.stdin.fileno(), False)
    steps, wall, cpu = 0, 0.0, 0.0
    while True:
        began, used = time.perf_counter(), time.thread_time()
        runner.run(StepPlan(items))
        steps, wall, cpu = steps + 1, wall + time.perf_counter() - began, cpu + time.thread_time() - used
        asked = sys.stdin.buffer.read(64)
        if asked == b"":
            return
        if asked:
            print(wall / steps, cpu / steps, flush=True)
            steps, wall, cpu = 0, 0.0, 0.0


@contextmanager
def neighbour() -> Iterator[Ask]:
    """Starts the child process and waits for its first steps; yields a function that returns the means since its
    last call.
    """
    command = [sys.executable, "-m", "baton.bench.kv.beside"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdin is not None
    assert child.stdout is not None
    to, back = child.stdin, child.stdout

    def asked() -> StepMeans:
        to.write(b"?\n")
        wall, cpu = back.readline().split()
        return StepMeans(float(wall), float(cpu))

    try:
        asked()
        yield asked
    finally:
        to.close()
        child.wait(10)


async def pairs(asked: Ask, work: Callable[[], Awaitable[object]], count: int, window_s: float) -> list[WindowPair]:
    """Measures ``count`` pairs of windows of ``window_s`` seconds; ``work`` is repeated in one window of each.

    ``asked`` is the function that ``neighbour`` yields.
    """
    found = []
    for number in range(count):
        took = {}
        for beside in (number % 2 == 0, number % 2 == 1):
            asked()
            await (_working(work, window_s) if beside else asyncio.sleep(window_s))
            took[beside] = asked()
        found.append(WindowPair(took[False], took[True]))
    return found


async def _working(work: Callable[[], Awaitable[object]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await work()


def rows(what: str, found: list[WindowPair]) -> list[Row]:
    """Returns rows of how many percent slower steps are while ``what`` happens: by wall time, with a target, and by
    CPU time.
    """
    wall = [(pair.beside.wall / pair.alone.wall - 1) * 100 for pair in found]
    cpu = [(pair.beside.cpu / pair.alone.cpu - 1) * 100 for pair in found]
    return [
        _row(f"decode step while {what}, slower by", wall, TARGET),
        _row(f"decode step while {what}, slower by, CPU time", cpu, 0.0),
    ]


def _row(name: str, percent: list[float], target: float) -> Row:
    low, high = interval(percent)
    return Row(name, median(percent), "%", target=target, ceiling=True, low=low, high=high)


if __name__ == "__main__":
    decode_steps()
