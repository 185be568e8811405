"""A simulated model that sees a part of a long context: sinks and a window, or what SnapKV chooses.

Knows nothing of schedulers or leases, nor of who chooses. It reads the pages that a step's plan names, and tells
how much the prompt's end attends to each run of 16 tokens, by a hash.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import xxhash

from baton.drill.language.oracle import attended
from baton.drill.models.runner import SimulatedRunner, Timing, places
from baton.engine.backends.paced.adapters import PacedAdapters
from baton.engine.backends.paced.runner import choose
from baton.engine.plan import SampledToken, SequenceStep, StepPlan, StepResult
from baton.kv.layout.selection import marked, parsed, selection_of
from baton.protos.nouns import BLOCK_TOKENS


class SelectedRunner(SimulatedRunner):
    """The paced runner with the selection that ``selected`` describes, as ``worker.kv_selection`` does."""

    def __init__(
        self,
        name: str,
        selected: str,
        timing: Timing,
        adapters: PacedAdapters | None,
    ) -> None:
        super().__init__(name, timing, adapters)
        layout = self.spec.layout
        layout = msgspec.structs.replace(layout, fidelity=marked(layout.fidelity, parsed(selected)))
        self.spec = msgspec.structs.replace(self.spec, layout=layout)
        self._by_position = selection_of(layout)

    def run(self, plan: StepPlan) -> StepResult:
        """Runs a step as the paced runner does, and tells what the tokens that select attended to."""
        found = super().run(plan)
        observed = {item.seq: self._observed(item, item.watch) for item in plan.items if item.watch is not None}
        return msgspec.structs.replace(found, observed=observed)

    def _advance(self, item: SequenceStep) -> Iterator[SampledToken]:
        self._write(item)
        known = item.start + len(item.tokens) - len(item.verify)
        for length, spec in enumerate(item.asks, known):
            digest = xxhash.xxh3_64()
            for begin, end in self._seen(item, length):
                digest.update(self._between(item, begin, end))
            yield choose(item.seq, digest, spec, self.spec.vocab_size)

    def _seen(self, item: SequenceStep, length: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges of places that the token before place ``length`` sees."""
        if self._by_position is None:
            behind, first = (place * BLOCK_TOKENS for place in item.gap)
        else:
            sinks, window = self._by_position
            behind, first = sinks, max(0, (length - 1) // BLOCK_TOKENS - window // BLOCK_TOKENS) * BLOCK_TOKENS
        if first <= behind:
            yield 0, length
            return
        yield 0, behind
        yield first, length

    def _between(self, item: SequenceStep, begin: int, end: int) -> bytes:
        return bytes(self._rows[places(item.pages, begin, end)].tobytes())

    def _observed(self, item: SequenceStep, watch: int) -> np.ndarray:
        end = item.start + len(item.tokens)
        last = self._between(item, end - 1, end)
        ends = (self._between(item, at, at + 1) for at in range(BLOCK_TOKENS - 1, watch, BLOCK_TOKENS))
        return np.array([attended(row, last) for row in ends], np.float32)
