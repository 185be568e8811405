"""Whole steps of the native runner: decoding and reading prompts, and what Python costs beside the native call.

Knows nothing of clusters. Bytes are those that a step must read: every packed weight once, and the batch's KV.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from baton.console.bench.engine.memory import MemoryRead
from baton.console.bench.engine.models import random_runner
from baton.console.bench.kv.rows import Row, median, paired, spread
from baton.engine.backends.native.runner import NativeRunner
from baton.evaluate.workload import PROMPT, Workload

MBU_TARGET, PYTHON_TARGET = 0.8, 0.03


def rows(size: str, scheme: str, kv: str, batches: tuple[int, ...], rounds: int) -> Iterator[Row]:
    """Decode at each batch size, Python's share at the largest, and one prompt of 512 tokens."""
    runner, weights = random_runner(size, scheme, kv)
    work, memory = Workload(runner, max(batches)), MemoryRead()
    name = f"{size} {scheme}, {kv} KV"
    for batch in batches:
        yield _decode(f"decode, {name}, batch {batch}", work, memory, batch, weights, rounds)
    yield _python(
        f"Python's share of a decode step, {name}, batch {max(batches)}", runner, work, max(batches), rounds
    )
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


def _python(name: str, runner: NativeRunner, work: Workload, batch: int, rounds: int) -> Row:
    """The time of ``run`` less that of the native call inside it."""
    inside, plans = 0.0, work.plans(batch)
    native_call = runner._run

    def timed(*arguments: object) -> None:
        nonlocal inside
        began = time.perf_counter()
        native_call(*arguments)
        inside += time.perf_counter() - began

    shares = []
    runner._run = timed
    for _ in range(rounds):
        inside = 0.0
        whole = work.run_seconds(plans)
        shares.append(1 - inside / whole)
    runner._run = native_call
    return Row(name, median(shares), "", spread=spread(shares), target=PYTHON_TARGET, ceiling=True)
