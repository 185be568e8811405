"""Benchmarks whole steps of the native runner: decoding, prefill, and Python's overhead beside the native call.

Knows nothing of clusters. The bytes counted are those that a step must read: each packed weight once, and the
batch's KV.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from baton.bench.engine.memory import MemoryRead
from baton.bench.engine.models import random_runner
from baton.bench.rows import Row, median, paired, spread
from baton.evaluate.workload import PROMPT, Workload
from baton.kernels.step import structs

# Least share of the memory's rate at batch 1; most share of a step that is Python's.
MBU_TARGET, PYTHON_TARGET = 0.8, 0.03


class TimedStep:
    """Calls the library's native step and adds up the ``seconds`` spent in it."""

    def __init__(self) -> None:
        self._run = structs.run_step()
        self.seconds = 0.0

    def __call__(self, *arguments: object) -> None:
        """Runs one native step and adds its duration to ``seconds``."""
        began = time.perf_counter()
        self._run(*arguments)
        self.seconds += time.perf_counter() - began


def rows(size: str, scheme: str, kv: str, batches: tuple[int, ...], rounds: int) -> Iterator[Row]:
    """Yields rows for decoding at each of ``batches``, Python's share at the largest, and prefill of one prompt."""
    native = TimedStep()
    runner, weights = random_runner(size, scheme, kv, native_step=native)
    work, memory = Workload(runner, max(batches)), MemoryRead()
    name = f"{size} {scheme}, {kv} KV"
    for batch in batches:
        yield _decode(f"decode, {name}, batch {batch}", work, memory, batch, weights, rounds)
    share = f"Python's share of a decode step, {name}, batch {max(batches)}"
    yield _python(share, native, work, max(batches), rounds)
    took = [work.prompt_seconds() for _ in range(rounds)]
    yield Row(f"prompt of {PROMPT} tokens, {name}", PROMPT / median(took), "tok/s", spread=spread(took))


def _decode(name: str, work: Workload, memory: MemoryRead, batch: int, weights: int, rounds: int) -> Row:
    steps, ceilings, read = [], [], weights + work.kv_bytes(batch)
    for _ in range(rounds):
        ceilings.append(memory.rate())
        steps.append(work.decode_seconds(batch))
    rates = [read / step for step in steps]
    return Row(
        name,
        batch / median(steps),
        "tok/s",
        peer=f"memory read, {median(ceilings) / 1e9:.3g} GB/s",
        ratio=paired(rates, ceilings),
        spread=spread(steps),
        target=MBU_TARGET if batch == 1 else 0.0,
    )


def _python(name: str, native: TimedStep, work: Workload, batch: int, rounds: int) -> Row:
    """Measures the share of ``run``'s time that is not spent in the native call inside it."""
    plans, shares = work.plans(batch), []
    for _ in range(rounds):
        native.seconds = 0.0
        whole = work.run_seconds(plans)
        shares.append(1 - native.seconds / whole)
    return Row(name, median(shares), "", spread=spread(shares), target=PYTHON_TARGET, ceiling=True)
