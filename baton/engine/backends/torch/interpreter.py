"""Runs a program op by op through the torch kernels; the reference with which faster runners are compared.

Knows nothing of plans or requests. Ops are bound to their weights once; a step is then one call per op.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.backends.expert_gate import gate_of
from baton.engine.backends.span_ops import SPAN_OPS, SpanOps
from baton.engine.backends.spans import StepSpans
from baton.engine.backends.torch.adapters import TorchAdapters
from baton.engine.backends.torch.batch import StepBatch
from baton.engine.backends.torch.decode_tables import DecodeAttention
from baton.engine.backends.torch.packed_products import HeldExperts
from baton.engine.program.ops import (
    Adapt,
    Add,
    Embedding,
    GeGlu,
    Linear,
    LmHead,
    Moe,
    NormPart,
    Op,
    PagedAttention,
    RmsNorm,
    RopeAppend,
    SwiGlu,
)
from baton.engine.program.program import Program
from baton.engine.program.sites import expert_sites, head_site
from baton.kernels.lm_head.reference import capped
from baton.kernels.moe.native import experts_of
from baton.kernels.moe.reference import NO_ADAPTERS, ExpertAdapters, Matrices
from baton.protos.nouns import KvLayout

Registers = dict[str, Tensor]


class KvPages(NamedTuple):
    """Views of the same KV pages in the shapes that ops need."""

    pages: Tensor  # (pages, layers x 2 x 16 x kv_heads x head_dim), to clear
    rows: Tensor  # (pages x layers x 2 x 16, kv_heads x head_dim), to write
    blocks: Tensor  # (pages x layers x 2, 16, kv_heads, head_dim), to read
    memory: Tensor | None = None  # (pages, page bytes) uint8, if known


Step = Callable[[Registers, StepBatch, KvPages], None]


class Interpreter:
    """Runs a program with weights through ``kernels``. ``layout`` is needed for ops of latents and recurrent
    state. ``decodes`` attends for the decodes of batches that have tables of them.
    """

    def __init__(
        self,
        program: Program,
        weights: dict[str, Any],
        kernels: SimpleNamespace,
        layout: KvLayout | None = None,
        adapters: TorchAdapters | None = None,
        decodes: DecodeAttention | None = None,
    ) -> None:
        self._program, self._weights, self._kernels, self._adapters = program, weights, kernels, adapters
        self._decodes = decodes
        self._layout, self._adapts = layout, 0
        self._spans: StepSpans | None = None  # of the step that runs
        self._steps: list[Step] = [_BINDERS[type(op)](self, op) for op in program.ops]

    def logits(self, batch: StepBatch, kv: KvPages) -> Tensor:
        """Runs a step, writing its K and V; returns the logits of ``batch.rows``, float32 (rows, vocab), padding
        included.
        """
        return self.registers(batch, kv)["logits"]

    def registers(self, batch: StepBatch, kv: KvPages) -> Registers:
        """Runs a step, writing its K and V; returns every register after the last op, with the logits in
        "logits".
        """
        if batch.begun.numel():
            kv.pages.index_fill_(0, batch.begun, 0.0)
        if self._decodes is not None and batch.decodes:
            self._decodes.plan(batch.decodes)
        registers: Registers = {}
        self.run(registers, batch, kv)
        return registers

    def run(self, registers: Registers, batch: StepBatch, kv: KvPages) -> None:
        """Runs every op on ``registers``, which must contain what the first ops read."""
        self._spans = None if kv.memory is None else StepSpans(batch.spans, kv.memory, batch.tokens)
        for step in self._steps:
            step(registers, batch, kv)
        if self._spans is not None:
            self._spans.finish()

    def states(self, registers: Registers, rows: slice) -> Tensor:
        """Returns the last layer's hidden states of ``rows``, with the head's norm applied."""
        head = self._program.ops[-1]
        assert isinstance(head, LmHead)
        x, delta = registers[head.x][rows], registers[head.delta][rows]
        states: Tensor = self._kernels.rms_norm(x, delta, self._weights[head.norm], head.eps)[1]
        found = states if head.norm_bias is None else states + self._weights[head.norm_bias].to(states.dtype)
        return found / head.scale

    def _span_op(self, op: Op) -> Step:
        """Binds an op that torch computes sequence by sequence, over the pages' bytes."""
        assert self._layout is not None, "its pages are read by their layout"
        run = SpanOps(self._program, self._weights, self._layout).bind(op)

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            assert self._spans is not None
            registers.update(run(registers.__getitem__, self._spans))

        return step

    def _weight(self, name: str | None) -> Any:
        return None if name is None else self._weights[name]

    def _embed(self, op: Embedding) -> Step:
        kernel, table = self._kernels.embedding, self._weights[op.weight]

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            found = kernel(batch.tokens, table)
            registers[op.out] = found if op.scale == 1.0 else found * torch.tensor(op.scale, dtype=found.dtype)

        return step

    def _rms_norm(self, op: RmsNorm) -> Step:
        kernel, weight = self._kernels.rms_norm, self._weights[op.weight]

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            delta = registers[op.delta] if op.delta else None
            registers[op.x], registers[op.out] = kernel(registers[op.x], delta, weight, op.eps)

        return step

    def _add(self, op: Add) -> Step:
        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            registers[op.x] = registers[op.x] + registers[op.delta]

        return step

    def _norm_part(self, op: NormPart) -> Step:
        kernel, weight = self._kernels.rms_norm, self._weights[op.weight]
        columns = slice(op.first, op.first + op.width)

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            whole = registers[op.x].clone()
            whole[:, columns] = kernel(whole[:, columns].contiguous(), None, weight, op.eps)[1]
            registers[op.x] = whole

        return step

    def _linear(self, op: Linear) -> Step:
        kernel, weight, bias = self._kernels.linear, self._weights[op.weight], self._weight(op.bias)

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            registers[op.out] = kernel(registers[op.x], weight, bias)

        return step

    def _adapt(self, op: Adapt) -> Step:
        kernel, adapters, site = self._kernels.lora, self._adapters, self._adapts
        self._adapts += 1
        assert adapters is not None, "an adaptable program needs what holds its adapters"

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            if batch.adapted and (groups := adapters.rows(site, batch.adapted)):
                x = batch.tokens if op.x is None else registers[op.x]
                registers[op.out] = kernel(registers[op.out], x, groups)

        return step

    def _rope_append(self, op: RopeAppend) -> Step:
        kernel, kv_heads, head_dim = self._kernels.rope_append, self._program.kv_heads, self._program.head_dim
        q_norm, k_norm = self._weight(op.q_norm), self._weight(op.k_norm)

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            qkv = registers[op.qkv]
            heads = qkv.view(qkv.shape[0], -1, head_dim)
            slots = batch.slots[op.layer]
            registers[op.out] = kernel(
                heads, *batch.rope_angles[op.rope], kv.rows, slots, kv_heads, q_norm, k_norm, op.eps
            )

        return step

    def _paged_attention(self, op: PagedAttention) -> Step:
        kernel, scale = self._kernels.paged_attention, self._program.scale
        heads, head_dim = self._program.heads, self._program.head_dim
        form = op.softcap, self._weight(op.sinks)
        decodes, layers = self._decodes, self._program.layers

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            q = registers[op.q].view(len(registers[op.q]), -1, head_dim)
            registers[op.out] = kernel(q, kv.blocks, batch.jobs[op.window], op.layer, scale, *form)
            if decodes is not None and batch.decodes:
                k, v = kv.blocks.view(-1, layers, 2, *kv.blocks.shape[1:])[:, op.layer].unbind(1)
                rows = slice(len(batch.decodes[op.window].last))
                attended = decodes.attend(q[rows], k, v, op.window, op.softcap)
                registers[op.out][rows] = attended.flatten(1)
            if batch.observation:
                keys = partial(_keys, kv.blocks, self._program.layers, op.layer)
                batch.observation.layer(q[:, :heads], keys, scale, op.softcap)

        return step

    def _swiglu(self, op: SwiGlu) -> Step:
        kernel = self._kernels.swiglu

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            registers[op.out] = kernel(registers[op.gate_up])

        return step

    def _geglu(self, op: GeGlu) -> Step:
        kernel = self._kernels.geglu

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            registers[op.out] = kernel(registers[op.gate_up])

        return step

    def _moe(self, op: Moe) -> Step:
        kernel, (gate_up, down) = self._kernels.moe, self._experts(op)
        gate, sites = gate_of(op, self._weights), expert_sites(self._program)
        beside = sites[op.gate_up], sites[op.down]

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            x, logits = registers[op.x], registers[op.logits]
            own = self._beside_experts(beside, batch)
            registers[op.out] = kernel(x, logits, gate_up, down, op.chosen, op.renormalise, gate, own)

        return step

    def _experts(self, op: Moe) -> tuple[Matrices, Matrices]:
        """Returns a layer's matrices by expert, of gates and ups and of downs."""
        pair = self._weights[op.gate_up], self._weights[op.down]
        if not any(isinstance(weight, HeldExperts) for weight in pair):
            return experts_of(*pair, op.experts, op.chosen, op.renormalise).singly()
        gate_up, down = (
            weight.matrices if isinstance(weight, HeldExperts) else weight.unflatten(0, (op.experts, -1))
            for weight in pair
        )
        return gate_up, down

    def _beside_experts(self, sites: tuple[int, int], batch: StepBatch) -> ExpertAdapters:
        """Returns what the rows' adapters have beside a layer of experts, whose two sites are ``sites``."""
        if self._adapters is None or not batch.adapted:
            return NO_ADAPTERS
        return ExpertAdapters(*(self._adapters.rows(site, batch.adapted) for site in sites))

    def _lm_head(self, op: LmHead) -> Step:
        kernel, norm, weight = self._kernels.lm_head, self._weights[op.norm], self._weights[op.weight]
        adapters, site, biases = self._adapters, head_site(self._program), self._head_biases(op)

        def step(registers: Registers, batch: StepBatch, kv: KvPages) -> None:
            x, delta = registers[op.x], registers[op.delta]
            beside = [] if adapters is None else adapters.rows(site, batch.adapted)
            cap = op.softcap if biases is None else 0.0
            logits = kernel(x, delta, batch.rows, norm, op.eps, weight, cap, beside)
            registers["logits"] = logits if biases is None else capped(logits + biases, op.softcap)

        return step

    def _head_biases(self, op: LmHead) -> Tensor | None:
        """Returns what is added to all logits, float32 (vocab,): the head's bias, and the product of its norm's."""
        found: Tensor | None = None if op.bias is None else self._weights[op.bias].float()
        if op.norm_bias is not None:
            product = self._kernels.linear(self._weights[op.norm_bias][None], self._weights[op.weight], None)[
                0
            ].float()
            found = product if found is None else found + product
        return found


def _keys(blocks: Tensor, layers: int, layer: int, pages: Tensor) -> Tensor:
    """Returns the keys of a layer on ``pages``, (tokens, kv_heads, head_dim)."""
    return blocks[(pages * layers + layer) * 2].flatten(0, 1)


_BINDERS: dict[type, Callable[[Interpreter, Any], Step]] = {
    Embedding: Interpreter._embed,
    RmsNorm: Interpreter._rms_norm,
    Add: Interpreter._add,
    NormPart: Interpreter._norm_part,
    Linear: Interpreter._linear,
    Adapt: Interpreter._adapt,
    RopeAppend: Interpreter._rope_append,
    PagedAttention: Interpreter._paged_attention,
    SwiGlu: Interpreter._swiglu,
    GeGlu: Interpreter._geglu,
    Moe: Interpreter._moe,
    LmHead: Interpreter._lm_head,
    **dict.fromkeys(SPAN_OPS, Interpreter._span_op),
}
