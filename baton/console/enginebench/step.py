"""Whole steps of the native runner: decoding and reading prompts, and what Python costs beside the native call.

Knows nothing of clusters. Bytes are those that a step must read: every packed weight once, and the batch's KV.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from baton.console.enginebench.memory import MemoryRead, seconds
from baton.console.enginebench.models import random_runner
from baton.console.kvbench.rows import Row, median, paired, spread
from baton.engine.native_runner import NativeRunner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.protos.nouns import BLOCK_TOKENS, Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=1 << 20)
CONTEXT, PROMPT = 512, 512
STEPS = 8
MBU_TARGET, PYTHON_TARGET = 0.8, 0.03


def rows(size: str, scheme: str, kv: str, batches: tuple[int, ...], rounds: int) -> Iterator[Row]:
    """Decode at each batch size, Python's share at the largest, and one prompt of 512 tokens."""
    runner, weights = random_runner(size, scheme, kv)
    memory, page = MemoryRead(), runner.spec.layout.page_bytes
    pages = max(batches) * (CONTEXT // BLOCK_TOKENS + 4) + PROMPT // BLOCK_TOKENS
    buffer = bytearray(pages * page)
    runner.bind(memoryview(buffer), pages)
    name = f"{size} {scheme}, {kv} KV"
    for batch in batches:
        read = weights + batch * CONTEXT // BLOCK_TOKENS * page
        yield _decode(f"decode, {name}, batch {batch}", runner, memory, batch, read, rounds)
    yield _python(f"Python's share of a decode step, {name}, batch {max(batches)}", runner, max(batches), rounds)
    plan = StepPlan((_item(0, CONTEXT, 0, PROMPT),))
    took = [seconds(lambda: runner.run(plan)) for _ in range(rounds)]
    yield Row(f"prompt of {PROMPT} tokens, {name}", PROMPT / median(took), "tok/s", spread=spread(took))


def _decode(name: str, runner: NativeRunner, memory: MemoryRead, batch: int, read: int, rounds: int) -> Row:
    steps, ceilings, plans = [], [], _plans(batch)
    for _ in range(rounds):
        ceilings.append(memory.rate())
        steps.append(seconds(lambda: _steps(runner, plans)) / STEPS)
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


def _plans(batch: int) -> list[StepPlan]:
    """Made before the clock starts: their tokens are drawn, which a worker doesn't do."""
    steps = range(CONTEXT, CONTEXT + STEPS)
    return [StepPlan(tuple(_item(seq, CONTEXT, start, 1) for seq in range(batch))) for start in steps]


def _steps(runner: NativeRunner, plans: list[StepPlan]) -> None:
    for plan in plans:
        runner.run(plan)


def _python(name: str, runner: NativeRunner, batch: int, rounds: int) -> Row:
    """The time of ``run`` less that of the native call inside it."""
    inside, native_call, plans = 0.0, runner._run, _plans(batch)

    def timed(*arguments: object) -> None:
        nonlocal inside
        began = time.perf_counter()
        native_call(*arguments)
        inside += time.perf_counter() - began

    shares = []
    runner._run = timed
    for _ in range(rounds):
        inside = 0.0
        whole = seconds(lambda: _steps(runner, plans))
        shares.append(1 - inside / whole)
    runner._run = native_call
    return Row(name, median(shares), "", spread=spread(shares), target=PYTHON_TARGET, ceiling=True)


def _item(seq: int, context: int, start: int, count: int) -> SequenceStep:
    """``count`` tokens of sequence ``seq``, whose pages are its own."""
    per = context // BLOCK_TOKENS + 4
    rng = random.Random(seq * 7919 + start)
    tokens = [rng.randrange(32000) for _ in range(count)]
    spec = SampleSpec(GREEDY, 0, start + count, tokens, 1)
    return SequenceStep(seq, tokens, start, range(seq * per, (seq + 1) * per), spec, count > 1)
