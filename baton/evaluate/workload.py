"""Steps of a runner for timing: decoding after a context, and prefill.

Knows nothing of clusters or of what the model says: token ids are random, and pages hold whatever they hold,
because speed doesn't depend on either.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from baton.engine.plan import Runner, SampleSpec, SequenceStep, StepPlan
from baton.kv.layout.state import state_pages
from baton.protos.nouns import BLOCK_TOKENS, Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=1 << 20)
CONTEXT, PROMPT = 512, 512  # tokens of KV before decoded ones, and tokens of a prompt
STEPS = 8  # decode steps that a rate is measured over


class Workload:
    """Times steps of ``runner``, on pages of its own for ``most`` sequences.

    Decoding is of sequences with CONTEXT tokens of KV; a prompt has no prefix, and ``prompt`` tokens at most.
    Recurrent states have pages of their own. Token ids below ``vocab`` are drawn anew for each step, and ``clock``
    counts seconds.
    """

    def __init__(
        self,
        runner: Runner,
        most: int,
        vocab: int = 32000,
        clock: Callable[[], float] = time.perf_counter,
        prompt: int = PROMPT,
    ) -> None:
        self.runner, self._rng, self._vocab, self._clock = runner, random.Random(0), vocab, clock
        pages = max(CONTEXT, prompt) // BLOCK_TOKENS + 4
        self._leased = [list(range(seq * pages, (seq + 1) * pages)) for seq in range(most)]  # as leases have them
        begin, each = most * pages + PROMPT // BLOCK_TOKENS, state_pages(runner.spec.layout)
        self._states = [list(range(begin + at * each, begin + (at + 1) * each)) for at in range(2 * most)]
        self.pages = begin + 2 * most * each
        self._buffer = bytearray(self.pages * runner.spec.layout.page_bytes)
        runner.bind(memoryview(self._buffer), self.pages)

    def decode_seconds(self, batch: int) -> float:
        """Returns the mean seconds of a step that advances ``batch`` sequences, over STEPS steps after a first
        one.
        """
        plans = self.plans(batch)
        self.runner.run(plans[0])
        return self.run_seconds(plans) / len(plans)

    def prompt_seconds(self, tokens: int = PROMPT) -> float:
        """Returns the seconds to prefill a prompt of ``tokens`` tokens and sample one."""
        return self.run_seconds([StepPlan((self._item(0, 0, tokens),))])

    def run_seconds(self, plans: list[StepPlan]) -> float:
        """Returns the seconds to run all of ``plans``, one after the other."""
        began = self._clock()
        for plan in plans:
            self.runner.run(plan)
        return self._clock() - began

    def plans(self, batch: int) -> list[StepPlan]:
        """Returns the plans of STEPS consecutive decode steps of ``batch`` sequences.

        They are made before timing, because they include drawing random tokens.
        """
        steps = range(CONTEXT, CONTEXT + STEPS)
        return [StepPlan(tuple(self._item(seq, start, 1) for seq in range(batch))) for start in steps]

    def kv_bytes(self, batch: int) -> int:
        """Returns the bytes of KV that a decode step of ``batch`` sequences reads, without recurrent states."""
        return batch * CONTEXT // BLOCK_TOKENS * self.runner.spec.layout.page_bytes

    def _item(self, seq: int, start: int, count: int) -> SequenceStep:
        """Returns the step of ``count`` tokens of sequence ``seq``."""
        tokens = [self._rng.randrange(self._vocab) for _ in range(count)]
        spec = SampleSpec(GREEDY, 0, start + count, tokens, 1)
        read, written = self._states[2 * seq + start % 2], self._states[2 * seq + 1 - start % 2]
        source = read if start and read else None
        return SequenceStep(
            seq, tokens, start, self._leased[seq], spec, count > 1, state_from=source, state_to=written
        )
