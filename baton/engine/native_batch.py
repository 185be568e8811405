"""From a step plan to the native step's struct: tokens, items with their block tables, and how to choose tokens.

Knows nothing of weights or ops. Rows lie in the plan's order. Whoever needs logits (logprobs, prompt scores) gets
them in ``logits``; every other row's token is chosen inside the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.sampling import COLDEST, uniform
from baton.kernels.step.structs import CHOICE, ITEM
from baton.protos.errors import BatonError
from baton.protos.nouns import BLOCK_TOKENS

Array = NDArray[Any]


class NativeBatch:
    """The arrays of one step; they live as long as this object does."""

    def __init__(self, plan: StepPlan, vocab_size: int, pages: int) -> None:
        items = plan.items
        self._kept: list[Array] = []
        counts = [len(item.tokens) for item in items]
        self.tokens = np.array([token for item in items for token in item.tokens], np.int32)
        self.rows = len(self.tokens)
        self.reach = max(item.start + count for item, count in zip(items, counts, strict=True))
        self.items = self._tables(items, counts, pages)
        self.sampled = tuple(item for item in items if item.sample)
        self.scored = tuple(item for item in items if item.targets)
        self.wanted = self._wanted_rows(items, counts)
        self.choices = np.zeros(len(self.wanted), CHOICE)
        self.logits, self.loud = self._logits(vocab_size)
        for row, item in enumerate(self.sampled):
            if row not in self.loud and item.sample is not None:
                self._kept += fill(self.choices[row], item.sample, vocab_size)

    def _tables(self, items: Sequence[SequenceStep], counts: list[int], pages: int) -> Array:
        blocks = [-(-(item.start + count) // BLOCK_TOKENS) for item, count in zip(items, counts, strict=True)]
        flat = np.array([page for item, n in zip(items, blocks, strict=True) for page in item.pages[:n]], np.int32)
        if flat.min() < 0 or flat.max() >= pages:
            raise BatonError(f"a block table names a page outside 0 … {pages - 1}")
        self.flat = flat
        found = np.empty(len(items), ITEM)
        found["queries"], found["start"] = counts, [item.start for item in items]
        found["first"] = np.cumsum(counts) - counts
        found["pages"] = flat.ctypes.data + 4 * (np.cumsum(blocks) - blocks)
        return found

    def _wanted_rows(self, items: Sequence[SequenceStep], counts: list[int]) -> Array:
        """The last row of each sampled item, then the scored rows."""
        ends = np.cumsum(counts)
        last = [end - 1 for item, end in zip(items, ends, strict=True) if item.sample]
        first = [end - count for end, count in zip(ends, counts, strict=True)]
        scored = [at + i for item, at in zip(items, first, strict=True) for i in range(len(item.targets))]
        return np.array([*last, *scored], np.int32)

    def _logits(self, vocab_size: int) -> tuple[Array, dict[int, int]]:
        """Room for the rows that want logits, and which row of it is whose."""
        asked = [row for row, item in enumerate(self.sampled) if item.sample and loud(item.sample)]
        asked += range(len(self.sampled), len(self.wanted))
        logits = np.empty((len(asked), vocab_size), np.float32)
        for at, row in enumerate(asked):
            self.choices[row]["logits"] = logits.ctypes.data + at * logits.strides[0]
        return logits, {row: at for at, row in enumerate(asked)}


def fill(choice: Any, spec: SampleSpec, vocab_size: int) -> list[Array]:
    """How ``spec`` chooses, into one row of CHOICE; the arrays that the row now points at."""
    sampling, kept = spec.sampling, []

    def point(field: str, array: Array) -> None:
        kept.append(array)
        choice[field] = array.ctypes.data

    choice["repetition"], choice["top_p"] = sampling.repetition_penalty, sampling.top_p
    if sampling.temperature >= COLDEST:
        choice["temperature"], choice["top_k"] = sampling.temperature, sampling.top_k
        choice["min_p"], choice["uniform"] = sampling.min_p, uniform(sampling.seed, spec.choice, spec.position)
    if sampling.penalised:
        choice["frequency"], choice["presence"] = sampling.frequency_penalty, sampling.presence_penalty
        point("history", np.fromiter(spec.history, np.int32, len(spec.history)))
        choice["history_count"], choice["prompt_count"] = len(spec.history), spec.prompt_tokens
    if sampling.logit_bias:
        point("bias_ids", np.array(list(sampling.logit_bias), np.int32))
        point("bias", np.array(list(sampling.logit_bias.values()), np.float32))
        choice["bias_count"] = len(sampling.logit_bias)
    if spec.allowed is not None:
        point("allowed", np.ascontiguousarray(spec.allowed(vocab_size)).view(np.uint8))
    if spec.banned:
        point("banned", np.array(spec.banned, np.int32))
        choice["banned_count"] = len(spec.banned)
    return kept


def loud(spec: SampleSpec) -> bool:
    """Whether the row's logits must leave the step."""
    return spec.sampling.logprobs is not None
