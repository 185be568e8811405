"""Runs a step as one native call: all layers, the choice of tokens included, without Python between them.

Knows nothing of schedulers or processes. With ``check`` each op is also run by its reference; with ``by_ops`` torch
calls them one by one.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from baton.engine.backends.native.batch import NativeBatch
from baton.engine.backends.native.program import NativeProgram, Weights
from baton.engine.backends.native.step_check import StepCheck
from baton.engine.backends.native.step_ops import StepOps
from baton.engine.backends.native.step_runner import StepRunner
from baton.engine.plan import ModelSpec, StepPlan
from baton.engine.program.ops import Program
from baton.kernels.step import structs
from baton.protos.nouns import EngineWork

NativeStep = Callable[..., object]  # (program's address, step by reference, first op, op after the last)


class NativeRunner(StepRunner):
    """Implements ``Runner`` on a CPU. Its ops share the process's pool of threads.

    ``native_step`` stands in for the library's own function of that name, for what measures it or tries another.
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
    ) -> None:
        super().__init__(spec, NativeProgram(program, weights, keep=check), clock, work)
        self._run = native_step or structs.run_step()
        self._arena = torch.empty(0)
        self._check = StepCheck(self._program, spec.layout) if check else None
        self._ops = StepOps(self._program, spec.layout) if by_ops else None
        self._memory = torch.empty((0, 0), dtype=torch.uint8)

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the KV pages, laid out as ``spec.layout`` says."""
        size = self.spec.layout.page_bytes
        self._memory = torch.frombuffer(buffer, dtype=torch.uint8, count=pages * size).view(pages, size)
        self._pages = pages

    def _compute(self, plan: StepPlan, batch: NativeBatch) -> None:
        self._reach(batch.reach)
        floats = batch.rows * self._program.row_floats
        if len(self._arena) < floats:
            self._arena = torch.empty(floats)
        step, count = self._step(batch), len(self._program.ops)
        step.turns, step.pages, step.arena = (t.data_ptr() for t in (self._turns, self._memory, self._arena))
        if self._check is None and self._ops is None:
            self._run(self._program.address, ctypes.byref(step), 0, count)
            return
        state = batch, self._arena, self._memory, self._turns
        for at in range(count):
            with nullcontext() if self._check is None else self._check.op(at, *state):
                if self._ops is None or not self._ops.run(at, *state):
                    self._run(self._program.address, ctypes.byref(step), at, at + 1)

    def _rows(self, batch: NativeBatch, name: str, rows: slice) -> Tensor:
        return self._program.register(self._arena, batch.rows, name)[rows].clone()
