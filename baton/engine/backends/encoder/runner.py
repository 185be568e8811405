"""Runs an encoder in steps: pages keep a text's token ids, and the step with its last part computes all of it.

Knows nothing of schedulers. A text may come in parts, from a cache or from another worker: the model reads what
is in the pages. Its vector is returned as pooled states, together with one token, which has no meaning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.backends.encoder.ops import EncoderOps
from baton.engine.backends.sequence_checks import require_computable
from baton.engine.checkpoints.weights import Weights
from baton.engine.plan import ModelSpec, PooledStates, SampledToken, SequenceStep, StepPlan, StepResult
from baton.engine.program.ops import Classify
from baton.engine.program.program import Program
from baton.protos.errors import InvalidRequest
from baton.protos.measurements import EngineWork
from baton.protos.nouns import BLOCK_TOKENS

TOKEN = 0  # stands in for the token that a request ends with
MOST_ROWS = 4096  # tokens computed at once, because an inner row takes 16 KB in a large model
NOTHING: NDArray[np.float32] = np.zeros(1, np.float32)  # the result for a text's earlier parts


class EncoderRunner:
    """Implements ``Runner`` for an encoder, whose pages contain token ids instead of KV."""

    def __init__(
        self,
        spec: ModelSpec,
        program: Program,
        weights: Weights,
        work: EngineWork | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.spec, self.work, self._clock = spec, work, clock
        self._ops = EncoderOps(program, weights)
        self._scores = any(isinstance(op, Classify) for op in program.ops)
        self._tokens: NDArray[np.int32] = np.empty((0, BLOCK_TOKENS), np.int32)

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the pages of token ids, (pages, 16) int32."""
        found = np.frombuffer(buffer, np.int32, count=pages * BLOCK_TOKENS)
        self._tokens = found.reshape(pages, BLOCK_TOKENS)

    def run(self, plan: StepPlan) -> StepResult:
        """Stores the step's tokens, computes each text that is complete and returns its pooled states.

        Raises InvalidRequest for an item that asks for tokens, or for another vector than this model makes.
        """
        began = self._clock()
        for item in plan.items:
            require_computable(item, self.spec.vocab_size, len(self._tokens))
            self._require_vector(item)
            self._write(item)
        complete = [item for item in plan.items if item.sample is not None]
        pooled = {item.seq: PooledStates(NOTHING.astype(np.float64), NOTHING) for item in plan.items}
        with torch.inference_mode():
            for together in _parts(complete):
                pooled |= self._computed(together)
        sampled = tuple(SampledToken(item.seq, TOKEN) for item in complete)
        return StepResult(sampled, self._clock() - began, {}, pooled)

    def _require_vector(self, item: SequenceStep) -> None:
        if not item.pool or item.verify or item.targets:
            raise InvalidRequest("this model is an encoder, which writes no tokens: ask for embeddings", "model")
        asked = item.sample.sampling.pooling if item.sample is not None else ""
        if asked and (asked == "score") != self._scores:
            wanted = "scores pairs: ask for a rerank or a score" if self._scores else "has no head that scores"
            raise InvalidRequest(f"this model {wanted}", "pooling")

    def _write(self, item: SequenceStep) -> None:
        at = np.arange(item.start, item.start + len(item.tokens))
        pages = np.asarray(item.pages, np.int64)[at // BLOCK_TOKENS]
        self._tokens[pages, at % BLOCK_TOKENS] = np.asarray(item.tokens, np.int32)

    def _text(self, item: SequenceStep) -> Tensor:
        end = item.start + len(item.tokens)
        pages = np.asarray(item.pages[: -(-end // BLOCK_TOKENS)], np.int64)
        return torch.from_numpy(self._tokens[pages].reshape(-1)[:end].astype(np.int64))

    def _computed(self, items: Sequence[SequenceStep]) -> dict[int, PooledStates]:
        texts = [self._text(item) for item in items]
        registers = self._ops.run(texts)
        rows = registers["x"].split([len(text) for text in texts])
        found = _states(rows, items) if not self._scores else map(_score, registers["score"])
        return {item.seq: each for item, each in zip(items, found, strict=True)}


def _states(texts: Sequence[Tensor], items: Sequence[SequenceStep]) -> Iterator[PooledStates]:
    for states, item in zip(texts, items, strict=True):
        assert item.sample is not None
        at, found = 0 if item.sample.sampling.pooling == "cls" else -1, states.numpy()
        yield PooledStates(found.sum(0, dtype=np.float64), found[at].copy())


def _score(found: Tensor) -> PooledStates:
    return PooledStates(NOTHING.astype(np.float64), found.numpy())


def _parts(items: Sequence[SequenceStep]) -> Iterator[list[SequenceStep]]:
    """Yields items whose texts are computed together: MOST_ROWS tokens at most, unless a single text has more."""
    part: list[SequenceStep] = []
    rows = 0
    for item in items:
        length = item.start + len(item.tokens)
        if part and rows + length > MOST_ROWS:
            yield part
            part, rows = [], 0
        part.append(item)
        rows += length
    if part:
        yield part
