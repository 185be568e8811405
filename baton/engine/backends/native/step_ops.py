"""Runs a native step's ops one by one through ``torch.ops.baton``, over the same registers and pages.

Knows nothing of plans. Turned on by BATON_STEP=ops: torch's profiler then shows each op and its time, which it
can't see inside the one native call, and a difference from that call's results is due to the step, not to an op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.backends.native.batch import NativeBatch
from baton.engine.backends.native.program import NativeProgram
from baton.engine.program import ops as p
from baton.kernels.linear.torch_op import parts
from baton.kernels.moe.native import Experts
from baton.kernels.registry import torch_ops
from baton.protos.nouns import KvLayout


class OpContext(NamedTuple):
    """The registers, tokens, pages and rotary angles on which an op works."""

    registers: Callable[[str], Tensor]  # returns a register by name, (rows, width)
    tokens: Tensor
    memory: Tensor  # all pages, (pages, page bytes) uint8
    rope_angles: Tensor  # rotary angles by position
    table: Tensor  # block tables of all items, one after the other
    items: Tensor  # (items, 3): begin in table, first position, rows


class StepOps:
    """Runs one program's ops through ``torch.ops.baton``, except the head, which samples by the batch's C
    structs.
    """

    def __init__(self, program: NativeProgram, layout: KvLayout) -> None:
        self._native, self._program, self._layout = program, program.program, layout
        self._ops: Any = torch_ops()

    def run(self, number: int, batch: NativeBatch, arena: Tensor, memory: Tensor, rope_angles: Tensor) -> bool:
        """Runs op ``number`` and returns True; returns False if torch has no op for it, so that the native step
        must run it.
        """
        op = self._native.ops[number]
        if (found := _OPS.get(type(op))) is None or (self._native.is_form(number) and not isinstance(op, p.GeGlu)):
            return False
        return found(self, op, self._state(batch, arena, memory, rope_angles)) is not False

    def _state(self, batch: NativeBatch, arena: Tensor, memory: Tensor, rope_angles: Tensor) -> OpContext:
        offsets = [(at - batch.flat.ctypes.data) // batch.flat.itemsize for at in batch.items["pages"].tolist()]
        runs = zip(offsets, batch.items["start"].tolist(), batch.items["queries"].tolist(), strict=True)
        return OpContext(
            lambda name: self._native.register(arena, batch.rows, name),
            torch.from_numpy(batch.tokens),
            memory,
            rope_angles,
            torch.from_numpy(batch.flat),
            torch.tensor(list(runs)),
        )

    def _pages(self, layer: int) -> tuple[str, int, int, int]:
        return self._layout.dtype, self._program.kv_heads, self._program.layers, layer

    def _vector(self, name: str | None) -> Tensor | None:
        return None if name is None else self._native.vectors[name]

    def _embed(self, op: p.Embedding, state: OpContext) -> None:
        state.registers(op.out).copy_(self._ops.embedding(state.tokens, self._native.tables[op.weight]))

    def _rms_norm(self, op: p.RmsNorm, state: OpContext) -> None:
        delta = None if op.delta is None else state.registers(op.delta)
        found = self._ops.rms_norm(state.registers(op.x), delta, self._vector(op.weight), op.eps)
        state.registers(op.out).copy_(found)

    def _linear(self, op: p.Linear, state: OpContext) -> bool:
        matrix = self._native.matrix(op.weight)
        weight = parts(matrix)
        state.registers(op.out).copy_(self._ops.linear(state.registers(op.x), *weight, self._vector(op.bias)))
        return True

    def _rope_append(self, op: p.RopeAppend, state: OpContext) -> None:
        qkv = state.registers(op.qkv).unflatten(1, (-1, self._program.head_dim))
        norms = self._vector(op.q_norm), self._vector(op.k_norm)
        at = state.memory, state.table, state.items
        self._ops.rope_append(qkv, *at, state.rope_angles, *norms, op.eps, *self._pages(op.layer))

    def _attention(self, op: p.PagedAttention, state: OpContext) -> None:
        m, at = self._program, (state.memory, state.table, state.items)
        q = state.registers(op.q).unflatten(1, (-1, m.head_dim))[:, : m.heads]
        found = self._ops.paged_attention(q, *at, *self._pages(op.layer), op.window, m.scale)
        state.registers(op.out).copy_(found.flatten(1))

    def _swiglu(self, op: p.SwiGlu, state: OpContext) -> None:
        state.registers(op.out).copy_(self._ops.swiglu(state.registers(op.gate_up)))

    def _geglu(self, op: p.GeGlu, state: OpContext) -> None:
        state.registers(op.out).copy_(self._ops.geglu(state.registers(op.gate_up)))

    def _moe(self, op: p.Moe, state: OpContext) -> bool:
        of, x, logits = self._native.experts[op.gate_up], state.registers(op.x), state.registers(op.logits)
        if not isinstance(of, Experts):
            return False  # packed ones, which torch's op has no form for
        state.registers(op.out).copy_(self._ops.moe(x, logits, of.gate_up, of.down, of.chosen, of.renormalise))
        return True


_OPS: dict[type, Callable[[StepOps, Any, OpContext], bool | None]] = {
    p.Embedding: StepOps._embed,
    p.RmsNorm: StepOps._rms_norm,
    p.Linear: StepOps._linear,
    p.RopeAppend: StepOps._rope_append,
    p.PagedAttention: StepOps._attention,
    p.SwiGlu: StepOps._swiglu,
    p.GeGlu: StepOps._geglu,
    p.Moe: StepOps._moe,
}
