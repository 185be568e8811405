"""Implements what native runners have in common on any device: from plans to arrays, from logits to results.

Knows nothing of where weights and pages are. Results don't depend on the batch: a sequence's results are bitwise
the same alone, batched, in chunks or replayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from baton.engine.backends.native.batch import NativeBatch
from baton.engine.backends.native.program import NativeProgram
from baton.engine.plan import ModelSpec, PooledStates, SampledToken, StepPlan, StepResult
from baton.engine.program.ops import LmHead
from baton.engine.program.rank_program import head_of
from baton.engine.sampling import choose, score
from baton.kernels.registry import kernels
from baton.kernels.rms_norm.reference import rms_norm
from baton.kernels.step import structs
from baton.kv.layout.selection import selection_of
from baton.kv.layout.tables import layers_of_page
from baton.protos.errors import BatonError
from baton.protos.measurements import EngineWork
from baton.protos.nouns import TokenLogprobs

FIRST_ANGLES = 2048  # positions in the first table of rotary angles, which grows


class StepRunner(ABC):
    """Base class of runners with a native step; implements ``Runner`` except ``bind``. One thread at a time may
    call it.
    """

    keeps_bits = True  # each row's sums are made in one order, whatever is beside it

    def __init__(
        self,
        spec: ModelSpec,
        native: NativeProgram,
        clock: Callable[[], float],
        work: EngineWork | None,
    ) -> None:
        self.spec, self.work = spec, work
        self._program, self._clock = native, clock
        self._rope = native.rope
        self._rope_angles = torch.empty((0, self._rope.width))
        self._angled, self._angles_stride = 0, self._rope.width  # positions in the table, and a position's floats
        self._draw = kernels().sample
        self._pages = 0
        self._layers = layers_of_page(spec.layout) if spec.layout.windows else native.program.layers
        self._selection = selection_of(spec.layout)
        size = spec.layout.page_bytes
        self._page_form = size, size // self._layers, structs.KV_TYPES[spec.layout.dtype]

    @abstractmethod
    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the KV pages, in the layout ``spec.layout``."""

    @abstractmethod
    def _compute(self, plan: StepPlan, batch: NativeBatch) -> None:
        """Runs the step: writes pages, and fills in the chosen tokens and the logits that are needed."""

    @abstractmethod
    def _rows(self, batch: NativeBatch, name: str, rows: slice) -> Tensor:
        """Returns a copy of some rows of a register of the last step."""

    def _needs_torch(self, batch: NativeBatch) -> bool:
        """Returns whether torch may compute something in the step; ``observed`` is empty else."""
        return True

    def _head(self) -> LmHead:
        """The op that ends the model's program."""
        return head_of(self._program.program)

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step and returns its results. If it raises, the whole step has failed and may be run again,
        which repeats all of its writes.
        """
        began = self._clock()
        if not plan.items or not self._pages:
            return StepResult((), self._clock() - began)
        batch = NativeBatch(plan, self.spec.vocab_size, self._pages, self._selection)
        if not self._needs_torch(batch):  # whose mode alone takes a tenth of what Python does in a step
            self._compute(plan, batch)
            return StepResult(tuple(self._chosen(batch)), self._clock() - began)
        with torch.inference_mode():
            self._compute(plan, batch)
            sampled = tuple(self._chosen(batch))
            scored = dict(self._scores(batch)) if batch.scored else {}
            pooled = dict(self._pooled(plan, batch)) if batch.pools else {}
            return StepResult(sampled, self._clock() - began, scored, pooled, observed=batch.observed)

    def _step(self, batch: NativeBatch) -> structs.Step:
        """Returns the step's struct with the host's addresses, without rotary angles, pages and arena."""
        tokens, items, sampled, choices = batch.addresses
        page_bytes, layer_bytes, kv_type = self._page_form
        return structs.Step(
            tokens=tokens,
            items=items,
            sampled=sampled,
            choices=choices,
            rows=batch.rows,
            page_bytes=page_bytes,
            layer_bytes=layer_bytes,
            angles_stride=self._angles_stride,
            item_count=batch.item_count,
            sampled_count=batch.wanted_count,
            kv_type=kv_type,
        )

    def _reach(self, positions: int) -> bool:
        """Extends the table of rotary angles, cos then sin of each position, to ``positions``; returns whether it
        is a new one.
        """
        have = self._angled
        if positions <= have:
            return False
        end = max(positions, 2 * have, FIRST_ANGLES)
        self._rope_angles = self._rope.by_position(end)
        self._angled = len(self._rope_angles)
        return True

    def _chosen(self, batch: NativeBatch) -> Iterator[SampledToken]:
        tokens = batch.chosen()
        if not batch.loud and (not tokens or min(tokens) >= 0):
            yield from [SampledToken(seq, token) for (seq, _), token in zip(batch.sampled, tokens, strict=True)]
            return
        rows = [batch.loud[row] for row in range(len(batch.sampled)) if row in batch.loud]
        asked = [ask for row, ask in enumerate(batch.sampled) if row in batch.loud]
        seqs, specs = [seq for seq, _ in asked], [spec for _, spec in asked]
        spoken = iter(choose(torch.from_numpy(batch.logits[rows]), seqs, specs, self._draw) if rows else ())
        _require_chosen(batch, tokens)
        for row, (seq, _) in enumerate(batch.sampled):
            yield next(spoken) if row in batch.loud else SampledToken(seq, tokens[row])

    def _pooled(self, plan: StepPlan, batch: NativeBatch) -> Iterator[tuple[int, PooledStates]]:
        """Yields the pooled states of the items that ask for them; the head's norm is applied to their rows
        alone.
        """
        head, end = self._head(), 0
        for item in plan.items:
            first, end = end, end + len(item.tokens)
            if item.pool:
                rows = slice(first, first + len(item.tokens))
                x, delta = (self._rows(batch, name, rows) for name in (head.x, head.delta))
                _, states = rms_norm(x, delta, self._program.vectors[head.norm], head.eps)
                states = self._program.head_biases.after_norm(states) / head.scale
                yield item.seq, PooledStates.of(states.numpy())

    def _scores(self, batch: NativeBatch) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
        at = len(batch.logits) - sum(len(item.targets) for item in batch.scored)
        for item in batch.scored:
            logits = torch.from_numpy(batch.logits[at : at + len(item.targets)])
            yield item.seq, score(logits, item.targets, item.score_top)
            at += len(item.targets)


def _require_chosen(batch: NativeBatch, tokens: list[int]) -> None:
    bad = [seq for row, (seq, _) in enumerate(batch.sampled) if row not in batch.loud and tokens[row] < 0]
    if bad:
        raise BatonError(f"sequences {bad} have no finite logit to choose from")
