"""Runs a step on the CPU as one native call: all layers and the sampling, without Python between them.

Knows nothing of schedulers or processes. With ``check`` each op is also run by its reference; with ``by_ops`` torch
calls them one by one.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby

import torch
from torch import Tensor

from baton.engine.adapters.base import AdapterBase
from baton.engine.backends.native.adapters import NativeAdapters
from baton.engine.backends.native.batch import NativeBatch
from baton.engine.backends.native.branches import BranchCopies, copyable, index_of
from baton.engine.backends.native.internals import NativeInternals
from baton.engine.backends.native.last_rows import LastRows
from baton.engine.backends.native.program import NativeProgram, Weights
from baton.engine.backends.native.states import StepStates
from baton.engine.backends.native.step_check import StepCheck
from baton.engine.backends.native.step_ops import StepOps
from baton.engine.backends.native.step_runner import StepRunner
from baton.engine.backends.observing import Observation
from baton.engine.backends.span_ops import SEQUENCE_OPS
from baton.engine.plan import ModelSpec, StepPlan, StepResult
from baton.engine.program.ops import PagedAttention
from baton.engine.program.program import Program
from baton.engine.program.sites import site_count
from baton.kernels.page_scores.native import add_row_scores
from baton.kernels.paged_attention.stored import read_layer
from baton.kernels.step import structs
from baton.kv.layout.selection import observed_of
from baton.protos.measurements import EngineWork

NativeStep = Callable[..., object]  # (program's address, step by reference, first op, op after the last)


class NativeRunner(StepRunner):
    """Implements ``Runner`` on a CPU. Its ops share the process's thread pool.

    ``native_step`` replaces the library's function of that name, for measurements and experiments. ``adapters`` has
    the requirements on adapters, if the program is adaptable. ``like`` is a compiled program whose weights this one
    shares. ``check`` compares each op with its reference, ``by_ops`` calls ops one by one through torch.
    """

    def __init__(
        self,
        spec: ModelSpec,
        program: Program,
        weights: Weights,
        clock: Callable[[], float] = time.perf_counter,
        check: bool = False,
        by_ops: bool = False,
        work: EngineWork | None = None,
        native_step: NativeStep | None = None,
        adapters: AdapterBase | None = None,
        like: NativeProgram | None = None,
    ) -> None:
        super().__init__(spec, NativeProgram(program, weights, check, like, spec.layout), clock, work)
        made = None if adapters is None else NativeAdapters(adapters, site_count(program), self._program.lora)
        self.adapters = made
        self._run = native_step or structs.run_step()
        self._arena = torch.empty(0)
        self._memory = torch.empty((0, 0), dtype=torch.uint8)
        self._angles_at = self._pages_at = self._arena_at = 0  # addresses of the step's memory
        self._arena_floats, self._row_floats = 0, self._program.row_floats
        self._check = StepCheck(self._program, spec.layout, made) if check else None
        self._ops = StepOps(self._program, spec.layout) if by_ops else None
        attends = {at: op.layer for at, op in enumerate(program.ops) if isinstance(op, PagedAttention)}
        selects = self._selection is not None or observed_of(spec.layout) is not None
        self._attends = frozenset(attends if selects else ())
        plain = not any(isinstance(op, SEQUENCE_OPS) for op in program.ops)
        self._any_torch = check or by_ops or selects or bool(spec.layout.states) or adapters is not None
        self.branches = not selects and plain and not spec.layout.windows and copyable(spec.layout)
        firsts = {layer: at for at, layer in reversed(attends.items())}  # first attention to each layer's K and V
        self._layer_of = {at: layer for layer, at in firsts.items()}
        self._branching = tuple(_stretches(len(program.ops), frozenset(self._layer_of))) if self.branches else ()
        self._copies: BranchCopies | None = None
        self._tables = self._program.page_tables()
        whole = _stretches(len(program.ops), self._attends)
        self._stretches = tuple(_by_table(whole, self._tables))
        self._last_rows = LastRows(self._program, self._stretches, self._tables)
        self.internals = NativeInternals(spec, self._program, self._shallow)

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the KV pages, in the layout ``spec.layout``."""
        size = self.spec.layout.page_bytes
        self._memory = torch.frombuffer(buffer, dtype=torch.uint8, count=pages * size).view(pages, size)
        self._pages, self._pages_at = pages, self._memory.data_ptr()
        if self.branches:
            self._copies = BranchCopies(self.spec.layout, self._layers, self._memory)

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step and returns its results. If it raises, the whole step has failed and may be run again,
        which repeats all of its writes.
        """
        return self.internals.with_states(super().run(plan), plan)

    def _shallow(self, program: Program, spec: ModelSpec) -> NativeRunner:
        return NativeRunner(spec, program, {}, self._clock, like=self._program)

    def _needs_torch(self, batch: NativeBatch) -> bool:
        if batch.rows != batch.wanted_count or batch.loud or batch.scored or batch.pools or batch.copies:
            return True
        return self._any_torch or self.internals.reads

    def _compute(self, plan: StepPlan, batch: NativeBatch) -> None:
        if self._reach(batch.reach):
            self._angles_at = self._rope_angles.data_ptr()
        if self.adapters is not None:
            self.adapters.group(plan.items)
        floats = batch.rows * self._row_floats
        if self._arena_floats < floats:
            self._arena = torch.empty(floats)
            self._arena_at, self._arena_floats = self._arena.data_ptr(), floats
        step, count = self._step(batch), len(self._program.ops)
        step.angles, step.pages, step.arena = self._angles_at, self._pages_at, self._arena_at
        seeing, watched = self._seeing(step, batch), Observation(plan.items if self._attends else ())
        states = self._states(plan)
        copies = index_of(batch.copies) if batch.copies else None
        told_of = [step, *(_with_items(step, items) for items in batch.tables[1:])]
        if self._spares(plan, batch):
            for begin, end in self._last_rows.first:
                self._ran(told_of[self._tables[begin]], begin, end)
            self._last_rows.run(step, batch, self._arena, self._ran)
            self._finish(batch, watched, states)
            return
        if self._check is None and self._ops is None:
            for begin, end in self.internals.stretches(self._stretches if copies is None else self._branching):
                self._copy(begin, copies)
                self._watch(begin, batch, watched)
                told = seeing if begin in self._attends else told_of[self._tables[begin]]
                self._run(self._program.address, ctypes.byref(told), begin, end)
                self.internals.passed(end, self._arena, batch.rows)
            self._finish(batch, watched, states)
            return
        state = batch, self._arena, self._memory, self._rope_angles
        if self._check is not None:
            self._check.begin(plan, self._memory)
        for at in range(count):
            self._copy(at, copies)
            self._watch(at, batch, watched)
            with nullcontext() if self._check is None else self._check.op(at, *state):
                if at in self._attends or not self._op_ran(at, state):
                    told = seeing if at in self._attends else step
                    self._run(self._program.address, ctypes.byref(told), at, at + 1)
            self.internals.passed(at + 1, self._arena, batch.rows)
        self._finish(batch, watched, states)

    def _spares(self, plan: StepPlan, batch: NativeBatch) -> bool:
        """Returns whether the last ops are run for some of the rows alone."""
        whole = self._check is not None or self._ops is not None or self._attends or self.internals.reads
        return not whole and self._last_rows.spares(batch) and not any(item.adapter for item in plan.items)

    def _ran(self, step: structs.Step, begin: int, end: int) -> None:
        """Runs ops ``begin`` to ``end`` - 1 of ``step``."""
        self._run(self._program.address, ctypes.byref(step), begin, end)

    def _op_ran(self, at: int, state: tuple[NativeBatch, Tensor, Tensor, Tensor]) -> bool:
        """Returns whether op ``at`` was run through ``torch.ops.baton``."""
        return self._ops is not None and self._ops.run(at, *state)

    def _states(self, plan: StepPlan) -> StepStates | None:
        """Returns the recurrent states that the step changes; None if the model has none."""
        if not self.spec.layout.states or self._program.spans is None:
            return None
        return StepStates(plan, self._memory, self._program.spans.states)

    def _finish(self, batch: NativeBatch, watched: Observation, states: StepStates | None) -> None:
        if states is not None:
            states.finish()
        batch.observed = watched.found()

    def _watch(self, at: int, batch: NativeBatch, watched: Observation) -> None:
        """Adds the attention that watched rows pay in op ``at``, if that is attention."""
        if not watched or at not in self._attends:
            return
        m, op = self._program.program, self._program.ops[at]
        assert isinstance(op, PagedAttention)
        form = m.layers, m.kv_heads, m.head_dim, self.spec.layout.dtype

        def keys(pages: Tensor) -> Tensor:
            return read_layer(self._memory, pages, op.layer, *form)[0]

        kv = structs.PagedKv(
            self._memory.data_ptr(),
            self.spec.layout.page_bytes,
            op.layer * (self.spec.layout.page_bytes // m.layers),
            *(structs.KV_TYPES[self.spec.layout.dtype], m.kv_heads, m.head_dim),
        )

        def add_row(q: Tensor, pages: Tensor, tokens: int, scores: Tensor) -> None:
            add_row_scores(kv, pages.int(), tokens, q, m.scale, op.softcap, scores)

        q = self._program.register(self._arena, batch.rows, op.q).unflatten(1, (-1, m.head_dim))[:, : m.heads]
        watched.layer(q, keys, m.scale, op.softcap, add_row)

    def _copy(self, at: int, copies: Tensor | None) -> None:
        """Copies the KV that branches of drafts begin with, if op ``at`` is the first attention to it."""
        if copies is not None and at in self._layer_of:
            assert self._copies is not None, "no pages are bound"
            self._copies.run(self._layer_of[at], copies)

    def _seeing(self, step: structs.Step, batch: NativeBatch) -> structs.Step:
        """Returns the step's struct for attention, with the pages that are seen."""
        if not self._attends:
            return step
        seeing = structs.Step.from_buffer_copy(step)
        seeing.items, seeing.item_count = batch.seen_at, len(batch.seen)
        return seeing

    def _rows(self, batch: NativeBatch, name: str, rows: slice) -> Tensor:
        return self._program.register(self._arena, batch.rows, name)[rows].clone()


def _with_items(step: structs.Step, items: int) -> structs.Step:
    """Returns a copy of ``step`` with the items at address ``items``, as many."""
    found = structs.Step.from_buffer_copy(step)
    found.items = items
    return found


def _by_table(ranges: Iterable[tuple[int, int]], tables: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields ``ranges`` of ops, cut where ``tables``, which has each op's page table, changes."""
    for begin, end in ranges:
        for _, group in groupby(range(begin, end), key=tables.__getitem__):
            ops = list(group)
            yield ops[0], ops[-1] + 1


def _stretches(count: int, apart: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Yields ops 0 … ``count`` - 1 as ranges, each op of ``apart`` alone."""
    begin = 0
    for at in sorted(apart):
        if begin < at:
            yield begin, at
        yield at, at + 1
        begin = at + 1
    if begin < count:
        yield begin, count
