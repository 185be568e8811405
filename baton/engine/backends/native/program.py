"""Compiles a program for the native step into a C array of ops with the weights' addresses.

Knows nothing of plans or requests. Registers contain float32 rows, whatever the weights are; ``q`` is a part of
``qkv``, where it is rotated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.engine.backends.native.epilogues import mark_gates, mark_norms
from baton.engine.backends.native.head_biases import HeadBiases
from baton.engine.backends.native.span_program import SpanCompiler
from baton.engine.backends.span_ops import SPAN_OPS, outputs
from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.rope import RopeTables
from baton.engine.program.sites import expert_sites, head_site
from baton.kernels.linear.cpu import linear
from baton.kernels.linear.packed import PackedWeight
from baton.kernels.linear.packed_floats import pack_floats
from baton.kernels.lora.structs import OP_LM_HEAD_ADAPTED, OP_LORA, AdaptedHead, LoraStep
from baton.kernels.moe.native import OP_MOE_ADAPTED, AdaptedMoeStruct, AnyExperts, BiasedMoeStruct, experts_of
from baton.kernels.step import structs
from baton.kv.layout.tables import layers_of_page
from baton.protos.nouns import KvLayout

TABLE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # common.h: Dtype; embedding/cpu.cpp
Weights = dict[str, Tensor | PackedWeight]


class NativeProgram:
    """A program compiled to C structs, and the memory to which these point. ``ops`` are the program's, in order.

    ``foreign`` has the indices of ops without native code; with the ``layout`` of pages, as on a CPU, there are
    none. Weights that ``like``, another program
    over the same model, has are shared with it. ``keep`` keeps the weights as they were loaded, for a check.
    """

    def __init__(
        self,
        program: Program,
        weights: Weights,
        keep: bool = False,
        like: NativeProgram | None = None,
        layout: KvLayout | None = None,
    ) -> None:
        self.program, self._like = program, like
        self.ops = program.ops
        self.rope = RopeTables(program.ropes, program.rotated, program.max_position)
        self.registers: dict[str, int] = {}
        self.widths: list[int] = []
        self._kept: list[object] = []
        self.vectors: dict[str, Tensor] = {}
        self.tables: dict[str, Tensor] = {}
        self.experts: dict[str, AnyExperts] = {}  # by the name of the first layer's weight
        self._packed: dict[str, PackedWeight] = {}
        self._weights = weights
        self.lora = LoraStep(None, 0)  # of the step that is run next
        self._adapts, self._expert_sites = 0, self._sites_of_experts()
        self._layers: dict[str, int] = {}  # addresses of layers of experts, by the first weight's name
        split = layout if layout is not None and layout.windows else None
        self._page_layers = max(1, program.layers if split is None else layers_of_page(split))
        shared = None if like is None or like.spans is None else like.spans.tensors
        self.spans: SpanCompiler | None = None
        if layout is not None:
            self.spans = SpanCompiler(self, weights if shared is None else shared, layout)
        for name, width in self._given().items():
            self._register(name, width)
        self.head_biases = self._head_biases(weights)
        found = [self._compiled(op) for op in program.ops]
        if layout is not None:
            mark_gates(program.ops, found, self.registers)
            mark_norms(program.ops, found, self.registers)
        self.foreign = frozenset(at for at, op in enumerate(found) if op.kind == structs.FOREIGN)
        self._array = (structs.Op * len(found))(*found)
        self._weights = weights if keep else {}  # without a check, what was packed needs no second copy
        self._widths = np.array(self.widths, np.int64)
        self.hidden = self.widths[self.registers["x"]]
        self.struct = structs.Model(
            ops=ctypes.addressof(self._array),
            widths=self._widths.ctypes.data,
            registers=len(self.widths),
            heads=program.heads,
            kv_heads=program.kv_heads,
            head_dim=program.head_dim,
            hidden=self.hidden,
            scale=program.scale,
        )
        self.address = ctypes.addressof(self.struct)

    def page_tables(self) -> list[int]:
        """Returns, for each op, which page table it reads or writes; for others that of the op before."""
        found, table = list[int](), 0
        for op in self.ops:
            if isinstance(op, p.RopeAppend | p.PagedAttention):
                table = op.layer // self._page_layers
            found.append(table)
        return found

    @property
    def row_floats(self) -> int:
        """Returns the number of floats that a row takes in all registers together."""
        return sum(self.widths)

    def is_form(self, number: int) -> bool:
        """Returns whether op ``number`` is of a form that only the CPU's step has."""
        return int(self._array[number].kind) >= structs.EMBED_SCALED

    def register(self, arena: Tensor, rows: int, name: str) -> Tensor:
        """Returns register ``name`` of the last step, of ``rows`` rows, as a view of ``arena``, (rows, width)."""
        number = self.registers[name]
        at = rows * sum(self.widths[:number])
        return arena[at : at + rows * self.widths[number]].view(rows, self.widths[number])

    @property
    def weights(self) -> Weights:
        """Returns all weights as they were loaded; empty unless they are kept."""
        return self._weights

    def weight(self, name: str) -> Tensor | PackedWeight:
        """Returns a weight as it was loaded, for the reference implementation."""
        return self._weights[name]

    def matrix(self, name: str) -> PackedWeight:
        """Returns a weight in the packed form by which the step multiplies."""
        return self._packed[name]

    def width_of(self, name: str) -> int:
        """Returns the number of floats in a row of register ``name``."""
        return self._width(name)

    def make_register(self, name: str, width: int) -> int:
        """Returns the index of register ``name``, which an op writes; creates it with ``width`` floats per row if
        it is new.
        """
        return self._register(name, width)

    def keep_struct(self, struct: ctypes.Structure) -> int:
        """Keeps ``struct`` alive and returns its address."""
        return self._keep(struct)

    def _given(self) -> dict[str, int]:
        """Returns the registers that have values before the first op, and their widths."""
        return {}

    def _compiled(self, op: p.Op) -> structs.Op:
        return _COMPILERS[type(op)](self, op)

    def _register(self, name: str, width: int) -> int:
        if name not in self.registers:
            self.registers[name] = len(self.widths)
            self.widths.append(width)
        assert self._width(name) == width, f"register {name} has two widths"
        return self.registers[name]

    def _width(self, name: str) -> int:
        return self.widths[self.registers[name]]

    def _floats(self, name: str | None) -> int | None:
        """Returns the address of a vector as float32."""
        if name is None:
            return None
        if self._like is not None:
            self.vectors[name] = self._like.vectors[name]
            return self._place(self.vectors[name])
        weight = self._weights[name]
        assert isinstance(weight, Tensor)
        vector = weight.float().contiguous()
        self.vectors[name] = vector
        return self._place(vector)

    def _matrix(self, name: str) -> PackedWeight:
        if self._like is not None:
            self._packed[name] = self._like.matrix(name)
        if name not in self._packed:
            weight = self._weights[name]
            if isinstance(weight, Tensor):
                weight = pack_floats(weight)
            self._packed[name] = weight
        return self._packed[name]

    def _place(self, tensor: Tensor) -> int:
        """Keeps a vector or a table alive and returns the address at which the step finds it."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _keep(self, struct: ctypes.Structure | ctypes.c_float) -> int:
        """Keeps an op's own struct alive and returns its address."""
        self._kept.append(struct)
        return ctypes.addressof(struct)

    def _place_matrix(self, name: str, weight: PackedWeight) -> int:
        """Returns the address of the struct of a matrix."""
        return weight.address

    def _place_experts(self, name: str, layer: AnyExperts) -> int:
        """Returns the address of the struct of a layer of experts."""
        struct = layer.struct
        self.experts[name] = layer
        self._kept += (layer, struct)
        return ctypes.addressof(struct)

    def _embed(self, op: p.Embedding) -> structs.Op:
        table = self._weights[op.weight] if self._like is None else self._like.tables[op.weight]
        if isinstance(table, PackedWeight):
            table = table.dequantized(torch.bfloat16)
        self.tables[op.weight] = table = table.contiguous()
        return structs.Op(
            kind=structs.EMBED if op.scale == 1.0 else structs.EMBED_SCALED,
            eps=op.scale,
            output=self._register(op.out, table.shape[1]),
            table=self._place(table),
            table_dtype=TABLE_DTYPES[table.dtype],
        )

    def _foreign(self, op: p.Op) -> structs.Op:
        """Compiles an op that only a CPU's step knows: without a layout, only its registers are made."""
        if self.spans is not None:
            return self.spans.compiled(op)
        for name, width in outputs(op, self._width, self.program.heads * self.program.head_dim).items():
            self._register(name, width)
        return structs.Op(kind=structs.FOREIGN)

    def _rms_norm(self, op: p.RmsNorm) -> structs.Op:
        if self._width(op.x) != self._width("x"):  # the native one norms rows of the residual stream alone
            return self._foreign(op)
        return structs.Op(
            kind=structs.RMS_NORM,
            input=self.registers[op.x],
            delta=-1 if op.delta is None else self.registers[op.delta],
            output=self._register(op.out, self._width(op.x)),
            norm=self._floats(op.weight),
            eps=op.eps,
        )

    def _add(self, op: p.Add) -> structs.Op:
        return structs.Op(kind=structs.ADD, input=self.registers[op.x], delta=self.registers[op.delta])

    def _norm_part(self, op: p.NormPart) -> structs.Op:
        return structs.Op(
            kind=structs.NORM_PART,
            input=self.registers[op.x],
            layer=op.first,
            window=op.width,
            norm=self._floats(op.weight),
            eps=op.eps,
        )

    def _linear(self, op: p.Linear) -> structs.Op:
        weight = self._matrix(op.weight)
        return structs.Op(
            kind=structs.LINEAR,
            input=self.registers[op.x],
            output=self._register(op.out, weight.n),
            weight=self._place_matrix(op.weight, weight),
            bias=self._floats(op.bias),
        )

    def _adapt(self, op: p.Adapt) -> structs.Op:
        self._adapts += 1
        return structs.Op(
            kind=OP_LORA,
            input=-1 if op.x is None else self.registers[op.x],
            output=self.registers[op.out],
            layer=self._adapts - 1,
            table=ctypes.addressof(self.lora),
        )

    def _rope_append(self, op: p.RopeAppend) -> structs.Op:
        self.registers[op.out] = self.registers[op.qkv]
        rotated, first = self.rope.rotated[op.rope], self.rope.offsets[op.rope]
        plain = not self.program.local_ropes and rotated == self.program.head_dim
        return structs.Op(
            kind=structs.ROPE_APPEND if plain else structs.ROPE_PART,
            window=rotated,
            delta=first,
            input=self.registers[op.qkv],
            output=self.registers[op.qkv],
            layer=op.layer % self._page_layers,
            q_norm=self._floats(op.q_norm),
            k_norm=self._floats(op.k_norm),
            eps=op.eps,
        )

    def _attention(self, op: p.PagedAttention) -> structs.Op:
        form = op.softcap or op.sinks
        return structs.Op(
            kind=structs.ATTENTION_FORM if form else structs.ATTENTION,
            table=self._keep(structs.AttentionForm(op.softcap, self._floats(op.sinks))) if form else None,
            input=self.registers[op.q],
            output=self._register(op.out, self.program.heads * self.program.head_dim),
            layer=op.layer % self._page_layers,
            window=op.window,
        )

    def _swiglu(self, op: p.SwiGlu) -> structs.Op:
        return structs.Op(
            kind=structs.SWIGLU,
            input=self.registers[op.gate_up],
            output=self._register(op.out, self._width(op.gate_up) // 2),
        )

    def _geglu(self, op: p.GeGlu) -> structs.Op:
        return structs.Op(
            kind=structs.GEGLU,
            input=self.registers[op.gate_up],
            output=self._register(op.out, self._width(op.gate_up) // 2),
        )

    def _moe(self, op: p.Moe) -> structs.Op:
        if self._like is not None:
            layer = self._like.experts[op.gate_up]
        else:
            gate_up, down = self._weights[op.gate_up], self._weights[op.down]
            layer = experts_of(gate_up, down, op.experts, op.chosen, op.renormalise)
        plain = self._place_experts(op.gate_up, layer)
        biased = None if op.gate is None else self._keep_biased(op.gate, layer)
        kind, table = (structs.MOE, plain) if biased is None else (structs.BIASED_MOE, biased)
        if self._adapts:
            kind, table = OP_MOE_ADAPTED, self._keep_adapted(op, plain, biased)
        return structs.Op(
            kind=kind,
            input=self.registers[op.x],
            delta=self.registers[op.logits],
            output=self._register(op.out, self._width(op.x)),
            table=table,
        )

    def _keep_adapted(self, op: p.Moe, plain: int, biased: int | None) -> int:
        """Returns the address of the struct of a layer of experts with places for adapters."""
        sites = (self._expert_sites[name] for name in (op.gate_up, op.down))
        return self._keep(AdaptedMoeStruct(plain, biased, ctypes.addressof(self.lora), *sites))

    def _keep_biased(self, gate: p.MoeGate, layer: AnyExperts) -> int:
        """Returns the address of the struct of a layer of experts with biases."""
        biases = self._floats(gate.gate_up_bias), self._floats(gate.down_bias)
        return self._keep(BiasedMoeStruct(layer.struct, *biases, gate.alpha, gate.limit))

    def _head_site(self) -> int:
        return head_site(self.program)

    def _sites_of_experts(self) -> dict[str, int]:
        return expert_sites(self.program)

    def _head_biases(self, weights: Weights) -> HeadBiases:
        """Returns the head's biases; that of its norm adds to each logit a number of its own."""
        head = self.ops[-1]
        if self._like is not None or not isinstance(head, p.LmHead):
            return HeadBiases() if self._like is None else self._like.head_biases
        return HeadBiases.of(head, weights, lambda rows: linear(rows, self._matrix(head.weight)))

    def _lm_head(self, op: p.LmHead) -> structs.Op:
        plain = structs.LM_HEAD_CAPPED if op.softcap else structs.LM_HEAD
        cap = self._keep(ctypes.c_float(op.softcap)) if op.softcap else None
        bias = self.head_biases.of_logits
        found = structs.Op(
            kind=plain,
            bias=None if bias is None else self._place(bias),
            table=cap,
            input=self.registers[op.x],
            delta=self.registers[op.delta],
            norm=self._floats(op.norm),
            eps=op.eps,
            weight=self._place_matrix(op.weight, self._matrix(op.weight)),
        )
        if self._adapts:
            self._adapt_head(found, op)
        return found

    def _adapt_head(self, found: structs.Op, op: p.LmHead) -> None:
        """Gives the head's struct places for adapters."""
        beside = AdaptedHead(ctypes.addressof(self.lora), self._head_site(), op.softcap)
        found.kind, found.table = OP_LM_HEAD_ADAPTED, self._keep(beside)


_COMPILERS: dict[type, Callable[[NativeProgram, Any], structs.Op]] = {
    p.Embedding: NativeProgram._embed,
    p.RmsNorm: NativeProgram._rms_norm,
    p.Add: NativeProgram._add,
    p.NormPart: NativeProgram._norm_part,
    p.Linear: NativeProgram._linear,
    p.Adapt: NativeProgram._adapt,
    p.RopeAppend: NativeProgram._rope_append,
    p.PagedAttention: NativeProgram._attention,
    p.SwiGlu: NativeProgram._swiglu,
    p.GeGlu: NativeProgram._geglu,
    p.Moe: NativeProgram._moe,
    p.LmHead: NativeProgram._lm_head,
    **dict.fromkeys(SPAN_OPS, NativeProgram._foreign),
}
