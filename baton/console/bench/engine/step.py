"""Whole steps of the native runner: decoding and reading prompts, and what Python costs beside the native call.

Knows nothing of clusters. Bytes are those that a step must read: every packed weight once, and the batch's KV.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from baton.console.bench.engine.memory import MemoryRead
from baton.console.bench.engine.models import random_runner
from baton.console.bench.kv.rows import Row, median, paired, spread
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.protos.nouns import BLOCK_TOKENS, Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=1 << 20)
CONTEXT, PROMPT = 512, 512
STEPS = 8
PAGES = CONTEXT // BLOCK_TOKENS + 4  # of one sequence
MBU_TARGET, PYTHON_TARGET = 0.8, 0.03


class Workload:
    """A runner with pages of its own for ``most`` sequences, and the times of what it is asked to do.

    Decoding is of sequences with CONTEXT tokens of KV behind them (whatever the pages hold: speed doesn't depend on
    it); a prompt has no prefix. Token ids are drawn anew for each.
    """

    def __init__(self, runner: NativeRunner, most: int, vocab: int = 32000) -> None:
        self.runner, self._rng, self._vocab = runner, random.Random(0), vocab
        self._leased = [list(range(seq * PAGES, (seq + 1) * PAGES)) for seq in range(most)]  # as leases have them
        pages = most * PAGES + PROMPT // BLOCK_TOKENS
        self._buffer = bytearray(pages * runner.spec.layout.page_bytes)
        runner.bind(memoryview(self._buffer), pages)

    def decode_seconds(self, batch: int) -> float:
        """Of one step that advances ``batch`` sequences: the mean of STEPS after one whose caches are cold."""
        plans = self.plans(batch)
        self.runner.run(plans[0])
        return self.run_seconds(plans) / len(plans)

    def prompt_seconds(self, tokens: int = PROMPT) -> float:
        """Of reading a prompt and choosing the token that follows."""
        return self.run_seconds([StepPlan((self._item(0, 0, tokens),))])

    def run_seconds(self, plans: list[StepPlan]) -> float:
        """Of all of ``plans``, one after the other."""
        began = time.perf_counter()
        for plan in plans:
            self.runner.run(plan)
        return time.perf_counter() - began

    def plans(self, batch: int) -> list[StepPlan]:
        """STEPS steps in a row. Made before the clock starts: their tokens are drawn, which a worker doesn't do."""
        steps = range(CONTEXT, CONTEXT + STEPS)
        return [StepPlan(tuple(self._item(seq, start, 1) for seq in range(batch))) for start in steps]

    def kv_bytes(self, batch: int) -> int:
        """What a decode step of ``batch`` sequences reads of KV."""
        return batch * CONTEXT // BLOCK_TOKENS * self.runner.spec.layout.page_bytes

    def _item(self, seq: int, start: int, count: int) -> SequenceStep:
        """``count`` tokens of sequence ``seq``, whose pages are its own."""
        tokens = [self._rng.randrange(self._vocab) for _ in range(count)]
        spec = SampleSpec(GREEDY, 0, start + count, tokens, 1)
        return SequenceStep(seq, tokens, start, self._leased[seq], spec, count > 1)


def rows(size: str, scheme: str, kv: str, batches: tuple[int, ...], rounds: int) -> Iterator[Row]:
    """Decode at each batch size, Python's share at the largest, and one prompt of 512 tokens."""
    runner, weights = random_runner(size, scheme, kv)
    work, memory = Workload(runner, max(batches)), MemoryRead()
    name = f"{size} {scheme}, {kv} KV"
    for batch in batches:
        yield _decode(f"decode, {name}, batch {batch}", work, memory, batch, weights, rounds)
    yield _python(f"Python's share of a decode step, {name}, batch {max(batches)}", work, max(batches), rounds)
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


def _python(name: str, work: Workload, batch: int, rounds: int) -> Row:
    """The time of ``run`` less that of the native call inside it."""
    inside, runner, plans = 0.0, work.runner, work.plans(batch)
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
