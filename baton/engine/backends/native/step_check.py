"""Runs each op of a native step by its reference as well, on the same inputs, and compares. Slow; for debugging.

Knows nothing of how the native step works inside. Turned on by BATON_CHECK_STEP=1. Raises BatonError naming the op
and its error relative to the reference's norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.backends.expert_gate import gate_of
from baton.engine.backends.native.adapters import NativeAdapters
from baton.engine.backends.native.batch import NativeBatch
from baton.engine.backends.native.branches import spans_of
from baton.engine.backends.native.program import NativeProgram
from baton.engine.backends.span_ops import SPAN_OPS, SpanOps
from baton.engine.backends.spans import StepSpans
from baton.engine.plan import StepPlan
from baton.engine.program import ops as p
from baton.engine.program.sites import expert_sites, head_site
from baton.kernels.abi.build import EMULATED
from baton.kernels.abi.native import isa
from baton.kernels.linear import packed
from baton.kernels.lm_head.reference import capped
from baton.kernels.moe.reference import NO_ADAPTERS
from baton.kernels.paged_attention.stored import attend_stored, quantized, read_layer
from baton.kernels.registry import kernels
from baton.kernels.step.structs import ITEM, LINEAR_F16, LINEAR_F32
from baton.protos.errors import BatonError
from baton.protos.nouns import BLOCK_TOKENS, KvLayout

# ‖native - reference‖ / ‖reference‖. Quantized layers also round their activations to 8 bits, bf16 ones to bf16.
EXACT = 1e-5
SPANS = 1e-4  # of recurrences, which the reference sums in chunks
LINEAR = {LINEAR_F32: 2e-5, LINEAR_F16: 2e-5, packed.BF16: 8e-3, packed.E4M3_A16: 8e-3, packed.E4M3_A8: 6e-2}
LINEAR |= dict.fromkeys((packed.W8_OUTLIERS, *packed.ROUNDED_ROWS), 3e-2)
LINEAR |= dict.fromkeys((kind + packed.A16 for kind in packed.ROUNDED_ROWS), 8e-3)
ATTENTION = {
    "float32": EXACT,
    "bfloat16": EXACT,
    "float16": EXACT,
    "int8": 5e-4,
    "fp8_e4m3": 2e-5,
}  # q has 15 bits against int8 keys
ROUNDED = 8e-3  # where q and weights are rounded to bf16 beside bf16 KV
ROUNDING = ("amx", EMULATED, "avx512")  # ISAs that do so
STORED = {
    "float32": EXACT,
    "bfloat16": 1e-3,
    "float16": 1e-3,
    "int8": 2e-3,
    "fp8_e4m3": 2e-2,
}  # a tie may round either way

Named = list[tuple[str, Tensor, Tensor, float]]


class CheckContext(NamedTuple):
    """The batch, registers, pages and rotary angles on which an op works."""

    batch: NativeBatch
    arena: Tensor  # registers
    memory: Tensor  # all pages, (pages, page bytes) uint8
    rope_angles: Tensor  # rotary angles by position


class StepCheck:
    """Compares one program's ops with their reference, on the native step's own registers and pages."""

    def __init__(self, program: NativeProgram, layout: KvLayout, adapters: NativeAdapters | None = None) -> None:
        self._native, self._program, self._layout, self._adapters = program, program.program, layout, adapters
        self._adapts = [op for op in program.ops if isinstance(op, p.Adapt)]
        self._kernels = kernels()
        self._dense: dict[str, Tensor] = {}
        self._span_ops: SpanOps | None = None
        if any(isinstance(op, SPAN_OPS) for op in program.ops):
            self._span_ops = SpanOps(self._program, program.weights, layout)
        self._spans = StepSpans((), torch.empty((0, 0), dtype=torch.uint8))

    def begin(self, plan: StepPlan, memory: Tensor) -> None:
        """Sets the step, on pages ``memory``, whose ops are checked next."""
        tokens = torch.tensor([token for item in plan.items for token in item.tokens])
        self._spans = StepSpans(spans_of(plan), memory, tokens)

    @contextmanager
    def op(
        self, number: int, batch: NativeBatch, arena: Tensor, memory: Tensor, rope_angles: Tensor
    ) -> Iterator[None]:
        """Returns a context in which op ``number`` has to be run natively; computes the reference before and
        compares afterwards.

        Raises BatonError if they differ by more than the op's tolerance.
        """
        op = self._native.ops[number]
        compare = _REFERENCES[type(op)](self, op, CheckContext(batch, arena, memory, rope_angles))
        yield
        for what, found, wanted, most in compare():
            error = float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
            if not error <= most:
                raise BatonError(f"op {number} {op}: {what} is {error:.2e} off its reference, at most {most:g}")

    def _optional(self, state: CheckContext, name: str | None) -> Tensor | None:
        return None if name is None else self._get(state, name)

    def _get(self, state: CheckContext, name: str) -> Tensor:
        return self._native.register(state.arena, state.batch.rows, name).clone()

    def _vector(self, name: str | None) -> Tensor | None:
        return None if name is None else self._native.weight(name).float()  # type: ignore[union-attr]

    def _matrix(self, name: str) -> tuple[Tensor, float]:
        """Returns the dense weight and its tolerance."""
        weight = self._native.weight(name)
        if isinstance(weight, Tensor):
            return weight.float(), LINEAR[_kind(weight)]
        if name not in self._dense:
            self._dense[name] = weight.dequantized()
        return self._dense[name], LINEAR[weight.kind]

    def _embed(self, op: p.Embedding, state: CheckContext) -> Callable[[], Named]:
        wanted = self._matrix(op.weight)[0][torch.from_numpy(state.batch.tokens).long()] * op.scale
        return lambda: [("out", self._get(state, op.out), wanted, 4e-3)]

    def _rms_norm(self, op: p.RmsNorm, state: CheckContext) -> Callable[[], Named]:
        x, delta = self._get(state, op.x), self._optional(state, op.delta)
        total, normed = self._kernels.rms_norm(x, delta, self._vector(op.weight), op.eps)
        return lambda: [
            ("x", self._get(state, op.x), total, EXACT),
            ("out", self._get(state, op.out), normed, EXACT),
        ]

    def _add(self, op: p.Add, state: CheckContext) -> Callable[[], Named]:
        wanted = self._get(state, op.x) + self._get(state, op.delta)
        return lambda: [("x", self._get(state, op.x), wanted, EXACT)]

    def _norm_part(self, op: p.NormPart, state: CheckContext) -> Callable[[], Named]:
        wanted, columns = self._get(state, op.x), slice(op.first, op.first + op.width)
        wanted[:, columns] = self._kernels.rms_norm(wanted[:, columns], None, self._vector(op.weight), op.eps)[1]
        return lambda: [("x", self._get(state, op.x), wanted, EXACT)]

    def _linear(self, op: p.Linear, state: CheckContext) -> Callable[[], Named]:
        weight, most = self._matrix(op.weight)
        wanted = F.linear(self._get(state, op.x), weight, self._vector(op.bias))
        return lambda: [("out", self._get(state, op.out), wanted, most)]

    def _adapt(self, op: p.Adapt, state: CheckContext) -> Callable[[], Named]:
        assert self._adapters is not None
        x = torch.from_numpy(state.batch.tokens) if op.x is None else self._get(state, op.x)
        site = next(number for number, one in enumerate(self._adapts) if one is op)
        wanted = self._kernels.lora(self._get(state, op.out), x, self._adapters.rows(site))
        return lambda: [("out", self._get(state, op.out), wanted, EXACT)]

    def _swiglu(self, op: p.SwiGlu, state: CheckContext) -> Callable[[], Named]:
        wanted = self._kernels.swiglu(self._get(state, op.gate_up))
        return lambda: [("out", self._get(state, op.out), wanted, EXACT)]

    def _geglu(self, op: p.GeGlu, state: CheckContext) -> Callable[[], Named]:
        wanted = self._kernels.geglu(self._get(state, op.gate_up))
        return lambda: [("out", self._get(state, op.out), wanted, EXACT)]

    def _moe(self, op: p.Moe, state: CheckContext) -> Callable[[], Named]:
        of, x, logits = self._native.experts[op.gate_up], self._get(state, op.x), self._get(state, op.logits)
        gate = gate_of(op, self._native.vectors)
        beside = NO_ADAPTERS
        if self._adapters is not None:
            beside = self._adapters.beside_experts(expert_sites(self._program), op)
        wanted = self._kernels.moe(x, logits, *of.singly(), of.chosen, of.renormalise, gate, beside)
        most = LINEAR[_kind(of.down)]
        return lambda: [("out", self._get(state, op.out), wanted, most)]

    def _rope_append(self, op: p.RopeAppend, state: CheckContext) -> Callable[[], Named]:
        m, rows = self._program, state.batch.rows
        qkv = self._get(state, op.qkv).view(rows, -1, m.head_dim)
        pages, positions = self._rows(state)
        first = self._native.rope.offsets[op.rope]
        own = slice(first, first + self._native.rope.rotated[op.rope])
        half = state.rope_angles[positions.long()][:, own].unflatten(1, (2, -1))
        cos = torch.cat((half[:, 0], half[:, 0]), -1)[:, None]
        sin = torch.cat((-half[:, 1], half[:, 1]), -1)[:, None]
        store = torch.zeros(2 * rows, m.kv_heads * m.head_dim)
        norms = self._vector(op.q_norm), self._vector(op.k_norm)
        q = self._kernels.rope_append(qkv, cos, sin, store, torch.arange(2 * rows), m.kv_heads, *norms, op.eps)
        wanted = quantized(store.view(2, rows, m.kv_heads, m.head_dim), self._layout.dtype)

        def compare() -> Named:
            found = self._get(state, op.out).view(rows, -1, m.head_dim)[:, : m.heads]
            at = torch.arange(rows) * BLOCK_TOKENS + positions % BLOCK_TOKENS
            keys, values = (plane[at] for plane in self._layer(state, pages, op.layer))
            most = STORED[self._layout.dtype]
            return [("q", found, q, EXACT), ("k", keys, wanted[0], most), ("v", values, wanted[1], most)]

        return compare

    def _attention(self, op: p.PagedAttention, state: CheckContext) -> Callable[[], Named]:
        m = self._program
        q = self._get(state, op.q).view(state.batch.rows, -1, m.head_dim)[:, : m.heads]
        outs = [self._attend(op, state, q, item) for item in state.batch.seen]
        most = ROUNDED if self._layout.dtype == "bfloat16" and isa() in ROUNDING else ATTENTION[self._layout.dtype]
        return lambda: [("out", self._get(state, op.out), torch.cat(outs), most)]

    def _attend(self, op: p.PagedAttention, state: CheckContext, q: Tensor, item: np.void) -> Tensor:
        first, _, queries, start = item.tolist()
        kv = self._layer(state, self._table(state, item), op.layer)
        rows, form = q[first : first + queries], (op.softcap, self._vector(op.sinks))
        return attend_stored(rows, kv, (start, queries), op.window, self._program.scale, *form).reshape(queries, -1)

    def _span(self, op: p.Op, state: CheckContext) -> Callable[[], Named]:
        """Compares with torch's result over copies of the registers; its states are its own, but both write the
        pages.
        """
        assert self._span_ops is not None
        found = self._span_ops.bind(op)(lambda name: self._get(state, name), self._spans)
        most = max(SPANS, STORED[self._layout.dtype]) if isinstance(op, p.LatentAttention) else SPANS

        def shown(x: Tensor) -> Tensor:
            return x.exp() if isinstance(op, p.Route | p.RouteTwo) else x  # logits may be -inf

        return lambda: [(name, shown(self._get(state, name)), shown(x), most) for name, x in found.items()]

    def _lm_head(self, op: p.LmHead, state: CheckContext) -> Callable[[], Named]:
        weight, most = self._matrix(op.weight)
        rows = torch.from_numpy(state.batch.wanted).long()
        x, delta = self._get(state, op.x), self._get(state, op.delta)
        beside = [] if self._adapters is None else self._adapters.rows(head_site(self._program))
        bias = self._native.head_biases.of_logits
        cap = op.softcap if bias is None else 0.0
        logits = self._kernels.lm_head(x, delta, rows, self._vector(op.norm), op.eps, weight, cap, beside)
        if bias is not None:
            logits = capped(logits + bias, op.softcap)
        loud = torch.tensor(list(state.batch.loud), dtype=torch.int64)
        return lambda: [("logits", torch.from_numpy(state.batch.logits), logits[loud], most)] if len(loud) else []

    def _table(self, state: CheckContext, item: np.void) -> Tensor:
        flat, first = state.batch.flat, (int(item["pages"]) - state.batch.flat.ctypes.data) // 4
        return torch.from_numpy(flat[first : first - (-int(item["start"] + item["queries"]) // BLOCK_TOKENS)])

    def _rows(self, state: CheckContext) -> tuple[Tensor, Tensor]:
        """Returns each row's page and position."""
        tables = [self._table(state, item) for item in state.batch.items]
        positions = [torch.arange(i["start"], i["start"] + i["queries"]) for i in state.batch.items]
        pages = [table[at // BLOCK_TOKENS] for table, at in zip(tables, positions, strict=True)]
        return torch.cat(pages), torch.cat(positions)

    def _layer(self, state: CheckContext, pages: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        m = self._program
        return read_layer(state.memory, pages, layer, m.layers, m.kv_heads, m.head_dim, self._layout.dtype)


def _kind(weight: Tensor | packed.PackedWeight) -> int:
    if isinstance(weight, packed.PackedWeight):
        return weight.kind
    return packed.BF16 if weight.dtype == torch.bfloat16 else LINEAR_F32


assert ITEM.names == ("first", "pages", "queries", "start")

_REFERENCES: dict[type, Callable[[StepCheck, Any, CheckContext], Callable[[], Named]]] = {
    p.Embedding: StepCheck._embed,
    p.RmsNorm: StepCheck._rms_norm,
    p.Add: StepCheck._add,
    p.NormPart: StepCheck._norm_part,
    p.Linear: StepCheck._linear,
    p.Adapt: StepCheck._adapt,
    p.RopeAppend: StepCheck._rope_append,
    p.PagedAttention: StepCheck._attention,
    p.SwiGlu: StepCheck._swiglu,
    p.GeGlu: StepCheck._geglu,
    p.Moe: StepCheck._moe,
    p.LmHead: StepCheck._lm_head,
    **dict.fromkeys(SPAN_OPS, StepCheck._span),
}
