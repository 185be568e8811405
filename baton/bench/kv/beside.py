"""What a decode step feels of the tiers: steps in a process of their own, with and without copying here, in turn.

Knows nothing of how long lifting takes. The step is that of the demo model on one thread; what is copied are pages
of another model's size, again and again, at the pace that a decode worker keeps. A pair is two short windows, one
with and one without, whose order turns from pair to pair; a figure is the median over all pairs of the ratio of the
two windows' mean steps, with the interval that holds the true median in 95 of 100 runs. The mean, because a step
that meets a copy is slowed and the one after it is not: a median of steps would not see it.

By the clock a step also waits for a core where others want it. Its thread's CPU time doesn't have that, and has
what it waits for memory: it says what is left when the machine is busy.
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
from baton.engine.load import EngineConfig, load_runner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.kv.memory.host_pages import PageMemory
from baton.protos.nouns import BLOCK_TOKENS, Sampling

TARGET = 2.0  # percent
PAIRS = 8  # for each of the other rows' rounds

Ask = Callable[[], "StepMeans"]


class StepMeans(NamedTuple):
    """Means over the steps of one window, in seconds."""

    wall: float
    cpu: float


class WindowPair(NamedTuple):
    """Two windows, one after the other."""

    alone: StepMeans
    beside: StepMeans


def decode_steps(sequences: int = 8, context: int = 512) -> None:
    """Runs decode steps for ever, as the child; at each line of stdin it tells what those since the last took."""
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
    """Starts the child and warms it; gives a function that asks it."""
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
    """Measures ``count`` pairs; ``work`` is done again and again in one window of each."""
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
    """Returns how many percent slower steps are: by the clock, which has the target, and by CPU time."""
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
