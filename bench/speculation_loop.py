"""Runs the real decode loop over a model of random weights whose choices are replaced by a script.

The model's steps are computed; what they "chose" is then a script's token, so that acceptance is ours to set. Knows
nothing of what is compared.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import msgspec

from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import Runner, SequenceStep, StepPlan, StepResult
from baton.engine.speculate.drafter import Drafter
from baton.engine.steps.parts import EngineParts
from baton.kernels.abi import native
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling
from bench.speculation_texts import PROMPT, TOKENS, Scripts


class Extent(msgspec.Struct, frozen=True):
    """Says how much is measured: rounds that count, tokens of an answer, fixed depths, chances of acceptance."""

    rounds: int
    tokens: int = TOKENS
    depths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    chances: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9)
    fixed_steps: int = 24  # of a fixed depth, whose steps' median is taken
    steps: int = 1440  # that a rate is taken of, where steps are short and rounds differ by percents
    warm_steps: int = 800  # of a new worker, before it is measured with set chances of acceptance
    tail_steps: int = 1920  # that a 99th percentile is taken of, in small batches

    @property
    def warm_runs(self) -> int:
        """Returns the runs before the first round, in which a new worker finds out whether drafts pay."""
        return self.warm_steps // self.tokens

    def rounds_at(self, batch: int) -> int:
        """Returns the rounds that count: more of small batches, whose steps are short."""
        wanted = -(-self.steps // self.tokens)
        return max(self.rounds, min(wanted, self.rounds * FEW_ROWS // batch))

    def tail_rounds_at(self, batch: int) -> int:
        """Returns the rounds whose steps a 99th percentile is taken of: a third as many in large batches."""
        wanted = -(-self.tail_steps // self.tokens)
        return max(self.rounds, -(-wanted // 3), min(wanted, wanted * FEW_ROWS // batch))


FEW_ROWS = 16  # of a batch that takes as many rounds as were asked for


class Scripted:
    """Is a runner whose choices are replaced by a script's tokens; the work is the model's.

    A step's seconds are those of ``clock``.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self.spec, self.work, self._runner, self._clock = runner.spec, runner.work, runner, clock
        self.bind, self.scripts = runner.bind, dict[int, list[int]]()
        self.took: list[float] = []

    def run(self, plan: StepPlan) -> StepResult:
        """Computes the step; each choice becomes the script's token at its position."""
        began = self._clock()
        found = self._runner.run(plan)
        self.took.append(self._clock() - began)
        tokens = iter([token for item in plan.items for token in self._tokens(item)])
        sampled = tuple([msgspec.structs.replace(one, token_id=next(tokens)) for one in found.sampled])
        return msgspec.structs.replace(found, sampled=sampled, seconds=self.took[-1])

    def _tokens(self, item: SequenceStep) -> list[int]:
        script = self.scripts[item.seq]
        return [script[spec.position - PROMPT] for spec in item.asks]


class Tape:
    """A channel that counts tokens."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def send(self, message: Any) -> None:
        """Counts what a step brought."""
        if isinstance(message, ch.Tokens):
            for output in message.outputs:
                self.tokens[output.key] = self.tokens.get(output.key, 0) + len(output.run.token_ids)

    def poll(self, timeout_s: float) -> list[Any]:
        """Returns [], because nobody asks this engine from outside."""
        return []


class Timed(msgspec.Struct):
    """Holds one run: tokens per second over all sequences, and the seconds of its steps."""

    rate: float
    steps: list[float]


class Answering:
    """Is a loop that decodes the answers to some prompts, which it has read; ``step`` writes the next tokens."""

    def __init__(self, loop: DecodeLoop, tape: Tape, count: int, clock: Callable[[], float]) -> None:
        self._loop, self.tape, self.count, self._clock = loop, tape, count, clock

    def step(self) -> float:
        """Returns the seconds of one step."""
        began = self._clock()
        self._loop.turn([])
        return self._clock() - began

    def close(self) -> None:
        """Ends the answers, whose prompts stay in the cache."""
        for key in list(self._loop.requests):
            self._loop.take(ch.Cancel(key, "measured"))


class Bench:
    """Runs one model; ``run`` decodes sequences until they got ``extent.tokens`` on average.

    Prompts stay in the cache, so that the runs of a round read them once. There are pages for ``loops`` loops of
    ``most`` sequences side by side.
    """

    def __init__(
        self,
        runner: NativeRunner,
        most: int,
        extent: Extent,
        cpu: bool = False,
        size: str = "150M",
        loops: int = 1,
    ) -> None:
        self.extent, self.size = extent, size
        self.clock = time.thread_time if cpu else time.perf_counter
        if cpu:
            native.set_threads(1)
        self.runner = Scripted(runner, self.clock)
        self.pages = loops * most * (PROMPT + 3 * TOKENS) // 16 + 64
        self._buffer = bytearray(self.pages * runner.spec.layout.page_bytes)
        self.runner.bind(memoryview(self._buffer), self.pages)
        self._pool = PagePool(self.pages)
        self._keys = 0

    def answering(self, prompts: Scripts, scripts: Scripts, drafter: Drafter | None) -> Answering:
        """Returns a loop that has read the prompts and writes ``scripts``, by name."""
        tape = Tape()
        parts = EngineParts.around(self.runner, self._pool, tape, time.monotonic)
        limits = DecodeLimits(chunk_tokens=1 << 16)
        loop = DecodeLoop(parts, limits, random.Random(0).randbytes, drafter)
        sampling = Sampling(temperature=0.0, max_tokens=2 * TOKENS, ignore_eos=True)
        for name, prompt in prompts.items():
            self._keys += 1
            self.runner.scripts[self._keys] = scripts[name]
            request = EngineRequest(name, tuple(prompt), PROMPT, sampling)
            loop.take(ch.Admit(self._keys, request, True, 0.0))
        while len(tape.tokens) < len(prompts):
            loop.turn([])
        return Answering(loop, tape, len(prompts), self.clock)

    def run(self, prompts: Scripts, scripts: Scripts, drafter: Drafter | None, steps: int = 0) -> Timed:
        """Reads the prompts, then times the answers, or ``steps`` of them."""
        answering = self.answering(prompts, scripts, drafter)
        found = self._timed(answering, steps)
        answering.close()
        return found

    def _timed(self, answering: Answering, steps: int) -> Timed:
        tokens, began, took = answering.tape.tokens, self.clock(), list[float]()
        before, wanted = sum(tokens.values()), answering.count * self.extent.tokens
        while len(took) < steps if steps else sum(tokens.values()) - before < wanted:
            took.append(answering.step())
        return Timed((sum(tokens.values()) - before) / (self.clock() - began), took)
