"""Drives a runner as a worker would, without one: chunked prompts, mixed batches, shuffled pages.

Knows nothing of leases or schedulers; used by the conformance and engine tests only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from baton.engine.grammar.running import Grammars
from baton.engine.grammar.state import GrammarState
from baton.engine.plan import Runner, SampledToken, SequenceStep, StepPlan
from baton.engine.sequence import SequenceState
from baton.kv.layout.state import state_pages
from baton.kv.layout.tables import table_count
from baton.protos.nouns import BLOCK_TOKENS, EngineRequest, Sampling, TokenLogprobs

MOST = 20  # sequences at once that keep a recurrent state


@dataclass
class Driver:
    """Runs requests together, with ``chunk`` prompt tokens per step and sequence and decodes mixed in."""

    runner: Runner
    pages: int
    chunk: int = 256
    seed: int = 0
    grammars: Grammars | None = None
    read: dict[int, tuple[list[TokenLogprobs], bytes]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pages += 2 * MOST * state_pages(self.runner.spec.layout)
        self.buffer = bytearray(self.pages * self.runner.spec.layout.page_bytes)
        self.runner.bind(memoryview(self.buffer), self.pages)
        self._free = list(range(self.pages))
        random.Random(self.seed).shuffle(self._free)
        self._states: dict[int, tuple[list[int] | None, list[int], list[int]]] = {}  # read, written, both

    def answer(
        self, prompts: Tokens[Tokens[int]], sampling: Sampling, choice: int = 0, adapters: Tokens[str] = ()
    ) -> list[list[int]]:
        """Every prompt's outputs, all of them run together, each on its own of ``adapters`` where there are any."""
        spec = self.runner.spec
        live: dict[int, tuple[SequenceState, list[int]]] = {}
        for key, prompt in enumerate(prompts):
            adapter = adapters[key] if adapters else ""
            request = EngineRequest(str(key), tuple(prompt), len(prompt), sampling, choice, adapter)
            blocks = -(-(len(prompt) + sampling.max_tokens) // BLOCK_TOKENS)
            pages = [self._free.pop() for _ in range(blocks * table_count(spec.layout))]
            sets = [[self._free.pop() for _ in range(state_pages(spec.layout))] for _ in range(2)]
            self._states[key] = None, sets[0], sets[0] + sets[1]
            live[key] = (
                SequenceState(key, request, spec.eos_token_ids, spec.max_model_len, self._grammar(request)),
                pages,
            )
        outputs: dict[int, list[int]] = {}
        while live:
            for found in self._step(live):
                sequence, pages = live[found.seq]
                sequence.append(found.token_id, found.logprobs)
                if found.logprobs:
                    self.logprobs.setdefault(found.seq, []).append(found.logprobs)
                if sequence.finish_reason:
                    outputs[found.seq] = sequence.tokens[sequence.request.prompt_tokens :]
                    self._free += pages + self._states.pop(found.seq)[2]
                    del live[found.seq]
        return [outputs[key] for key in range(len(prompts))]

    def _grammar(self, request: EngineRequest) -> GrammarState | None:
        return None if self.grammars is None else self.grammars.begin(request)

    def _step(self, live: dict[int, tuple[SequenceState, list[int]]]) -> tuple[SampledToken, ...]:
        plan = StepPlan(tuple(self._item(sequence, pages) for sequence, pages in live.values()))
        result = self.runner.run(plan)
        for item in plan.items:
            _, written, both = self._states[item.seq]
            self._states[item.seq] = written, [page for page in both if page not in written], both
        for item in plan.items:
            sequence = live[item.seq][0]
            sequence.score(item.start, result.scored.get(item.seq, ()))
            sequence.computed += len(item.tokens)
            sequence.pool(item.start, sequence.computed, result.pooled.get(item.seq))
            if sequence.scores or item.pool:
                self.read[item.seq] = sequence.scores, sequence.pooled()
        return result.sampled

    def _item(self, sequence: SequenceState, pages: list[int]) -> SequenceStep:
        start, count = sequence.computed, min(self.chunk, sequence.pending)
        last = count == sequence.pending
        tokens = sequence.tokens[start : start + count]
        sample = sequence.sample_spec() if last else None
        table, *further = _tables(pages, table_count(self.runner.spec.layout))
        targets, top = sequence.targets(count), sequence.request.sampling.prompt_logprobs or 0
        return SequenceStep(
            sequence.seq,
            tokens,
            start,
            table,
            sample,
            count > 1,
            targets=targets,
            score_top=top,
            pool=sequence.pools,
            state_from=self._states[sequence.seq][0],
            state_to=self._states[sequence.seq][1],
            adapter=sequence.request.adapter_id,
            tables=tuple(further),
        )


def _tables(pages: list[int], count: int) -> list[list[int]]:
    """Returns a sequence's ``count`` page tables: ``pages`` itself, or equal parts of it."""
    each = len(pages) // count
    return [pages] if count == 1 else [pages[at * each : (at + 1) * each] for at in range(count)]
