"""The runner whose step is one native call: all layers, the choice of tokens included, without Python between them.

Knows nothing of schedulers or processes. Results don't depend on the batch: a sequence's tokens are bitwise the
same alone, batched, in chunks or replayed. With ``check`` each op is also run by its reference.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from baton.engine import rope
from baton.engine.native_batch import NativeBatch
from baton.engine.native_program import NativeProgram, Weights
from baton.engine.plan import ModelSpec, Pooled, Sampled, StepPlan, StepResult
from baton.engine.program import LmHead, Program
from baton.engine.sampling import choose, score
from baton.engine.step_check import StepCheck
from baton.kernels.registry import kernels
from baton.kernels.rms_norm.reference import rms_norm
from baton.kernels.step import structs
from baton.protos.errors import BatonError
from baton.protos.nouns import EngineWork, TokenLogprobs

FIRST_TURNS = 2048


class NativeRunner:
    """Implements ``Runner``. One thread at a time calls it; its ops share the process's pool of threads."""

    def __init__(
        self,
        spec: ModelSpec,
        program: Program,
        weights: Weights,
        clock: Callable[[], float] = time.perf_counter,
        check: bool = False,
        work: EngineWork | None = None,
    ) -> None:
        self.spec, self.work = spec, work
        self._program = NativeProgram(program, weights, keep=check)
        self._clock, self._run = clock, structs.run_step()
        self._inverse, self._factor = rope.frequencies(program.rope, program.head_dim, program.max_position)
        self._turns = torch.empty((0, program.head_dim))
        self._arena = torch.empty(0)
        self._draw = kernels().sample
        self._check = StepCheck(self._program, spec.layout) if check else None
        self._memory: Tensor | None = None
        self._pages = 0

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Use ``buffer`` as the KV pages, laid out as ``spec.layout`` says."""
        size = self.spec.layout.page_bytes
        self._memory = torch.frombuffer(buffer, dtype=torch.uint8, count=pages * size).view(pages, size)
        self._pages = pages

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step. Raises for the whole step and may be repeated: what it wrote, it writes again."""
        began = self._clock()
        if not plan.items or self._memory is None:
            return StepResult((), self._clock() - began)
        with torch.inference_mode():
            batch = NativeBatch(plan, self.spec.vocab_size, self._pages)
            self._compute(batch, self._memory)
            sampled = tuple(self._chosen(batch))
            scored, pooled = dict(self._scores(batch)), dict(self._pooled(plan, batch))
            return StepResult(sampled, self._clock() - began, scored, pooled)

    def _compute(self, batch: NativeBatch, memory: Tensor) -> None:
        step, count = self._step(batch, memory), len(self._program.ops)
        if self._check is None:
            self._run(self._program.address, ctypes.byref(step), 0, count)
            return
        for at in range(count):
            with self._check.op(at, batch, self._arena, memory, self._turns):
                self._run(self._program.address, ctypes.byref(step), at, at + 1)

    def _step(self, batch: NativeBatch, memory: Tensor) -> structs.Step:
        self._reach(batch.reach)
        floats = batch.rows * self._program.row_floats
        if len(self._arena) < floats:
            self._arena = torch.empty(floats)
        layout = self.spec.layout
        return structs.Step(
            tokens=batch.tokens.ctypes.data,
            items=batch.items.ctypes.data,
            sampled=batch.wanted.ctypes.data,
            choices=batch.choices.ctypes.data,
            turns=self._turns.data_ptr(),
            pages=memory.data_ptr(),
            arena=self._arena.data_ptr(),
            rows=batch.rows,
            page_bytes=layout.page_bytes,
            layer_bytes=layout.page_bytes // self._program.program.layers,
            turns_stride=self._turns.shape[1],
            item_count=len(batch.items),
            sampled_count=len(batch.wanted),
            kv_type=structs.KV_TYPES[layout.dtype],
        )

    def _reach(self, positions: int) -> None:
        """Let the table of turns, cos then sin of each position, hold ``positions``."""
        have = len(self._turns)
        if positions <= have:
            return
        end = max(positions, 2 * have, FIRST_TURNS)
        cos, sin = rope.tables(torch.arange(end), self._inverse, self._factor, torch.float32)
        half = cos.shape[-1] // 2
        self._turns = torch.cat((cos[:, 0, :half], sin[:, 0, half:]), -1).contiguous()

    def _chosen(self, batch: NativeBatch) -> Iterator[Sampled]:
        if not batch.sampled:
            return
        rows = [batch.loud[row] for row in range(len(batch.sampled)) if row in batch.loud]
        asked = [item for row, item in enumerate(batch.sampled) if row in batch.loud]
        specs = [item.sample for item in asked if item.sample]
        seqs = [item.seq for item in asked]
        spoken = iter(choose(torch.from_numpy(batch.logits[rows]), seqs, specs, self._draw) if rows else ())
        tokens = batch.choices["token"].tolist()
        _require_chosen(batch, tokens)
        for row, item in enumerate(batch.sampled):
            yield next(spoken) if row in batch.loud else Sampled(item.seq, tokens[row])

    def _pooled(self, plan: StepPlan, batch: NativeBatch) -> Iterator[tuple[int, Pooled]]:
        """Of the items that ask; the head's norm is applied here, to their rows alone."""
        head = self._program.ops[-1]
        assert isinstance(head, LmHead)
        for item, first in zip(plan.items, batch.items["first"].tolist(), strict=True):
            if item.pool:
                x, delta = (self._program.register(self._arena, batch.rows, r) for r in (head.x, head.delta))
                rows = slice(first, first + len(item.tokens))
                _, states = rms_norm(x[rows].clone(), delta[rows], self._program.vectors[head.norm], head.eps)
                yield item.seq, Pooled.of(states.numpy())

    def _scores(self, batch: NativeBatch) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
        at = len(batch.logits) - sum(len(item.targets) for item in batch.scored)
        for item in batch.scored:
            logits = torch.from_numpy(batch.logits[at : at + len(item.targets)])
            yield item.seq, score(logits, item.targets, item.score_top)
            at += len(item.targets)


def _require_chosen(batch: NativeBatch, tokens: list[int]) -> None:
    bad = [item.seq for row, item in enumerate(batch.sampled) if row not in batch.loud and tokens[row] < 0]
    if bad:
        raise BatonError(f"sequences {bad} have no finite logit to choose from")
