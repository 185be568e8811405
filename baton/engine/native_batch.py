"""From a step plan to the native step's struct: tokens, items with their block tables, and how to choose tokens.

Knows nothing of weights or ops. Rows lie in the plan's order. Whoever needs logits (logprobs, prompt scores) gets
them in ``logits``; every other row's token is chosen inside the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.sampling import COLDEST, uniform
from baton.engine.validate import require_computable
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
        self.ends = list(accumulate(counts))
        self.rows = self.ends[-1]
        self.tokens = np.fromiter(chain.from_iterable(item.tokens for item in items), np.int64, self.rows)
        if self.tokens.min() < 0 or self.tokens.max() >= vocab_size:
            _explain(items, vocab_size, pages)
        self.tokens = self.tokens.astype(np.int32)
        self.items = self._tables(items, counts, vocab_size, pages)
        self.sampled = tuple(item for item in items if item.sample)
        self.scored = tuple(item for item in items if item.targets)
        self.wanted = self._wanted_rows(items, counts)
        self.choices = np.zeros(len(self.wanted), CHOICE)
        self.choices["repetition"] = self.choices["top_p"] = 1.0
        self.logits, self.loud = self._logits(vocab_size)
        for row, item in enumerate(self.sampled):
            if row not in self.loud and item.sample is not None and not item.sample.plain:
                self._kept += fill(self.choices[row], item.sample, vocab_size)

    def _tables(self, items: Sequence[SequenceStep], counts: list[int], vocab_size: int, pages: int) -> Array:
        starts = [item.start for item in items]
        reach = [start + count for start, count in zip(starts, counts, strict=True)]
        self.reach = max(reach)
        blocks = [-(-end // BLOCK_TOKENS) for end in reach]
        tables = [item.pages[:n] for item, n in zip(items, blocks, strict=True)]
        try:
            flat = np.fromiter(chain.from_iterable(tables), np.int32, sum(blocks))
        except (ValueError, OverflowError):
            _explain(items, vocab_size, pages)
        if flat.min() < 0 or flat.max() >= pages:
            _explain(items, vocab_size, pages)
        self.flat = flat
        found = np.empty(len(items), ITEM)
        found["queries"], found["start"] = counts, starts
        found["first"] = self.ends
        found["first"] -= found["queries"]
        base = flat.ctypes.data
        found["pages"] = [base + 4 * (end - n) for end, n in zip(accumulate(blocks), blocks, strict=True)]
        return found

    def _wanted_rows(self, items: Sequence[SequenceStep], counts: list[int]) -> Array:
        """The last row of each sampled item, then the scored rows."""
        wanted = [end - 1 for item, end in zip(items, self.ends, strict=True) if item.sample]
        for item, count, end in zip(items, counts, self.ends, strict=True) if self.scored else ():
            wanted += range(end - count, end - count + len(item.targets))
        return np.array(wanted, np.int32)

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


def _explain(items: Sequence[SequenceStep], vocab_size: int, pages: int) -> NoReturn:
    """Raise for the first item that can't be computed."""
    for item in items:
        require_computable(item, vocab_size, pages)
    raise BatonError(f"a block table names a page outside 0 … {pages - 1}")


def loud(spec: SampleSpec) -> bool:
    """Whether the row's logits must leave the step."""
    return spec.sampling.logprobs is not None
