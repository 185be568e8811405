"""Compiles a rank's share of a program for the native step, with registers that all ranks fill together.

Knows nothing of processes or of where the shared registers are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.backends.native.head_biases import vector
from baton.engine.backends.native.program import NativeProgram, Weights
from baton.engine.backends.ranks.placement import EMPTY, Placement
from baton.engine.program import ops as p
from baton.engine.program.rank_program import RankProgram, Residual
from baton.kernels.abi.native import I32, I64, P
from baton.kernels.moe.native import AnyExperts, BiasedMoeStruct, experts_of
from baton.kernels.step import structs
from baton.kv.layout.state import state_bytes
from baton.kv.layout.tables import table_count
from baton.protos.nouns import KvLayout

ALIGN = 64  # bytes
GATHER, EXPERTS, BIASED_EXPERTS, MIX, EXCHANGE = range(128, 133)  # step/ranks/ranks.h: RankOpKind


def joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns stretches (begin, bytes) in order, those that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for begin, size in sorted(spans):
        if found and begin <= sum(found[-1]):
            found[-1] = found[-1][0], max(sum(found[-1]), begin + size) - found[-1][0]
        else:
            found.append((begin, size))
    return found


class CarriedRegisters(ctypes.Structure):
    """Mirrors the C struct CarriedRegisters of step/ranks/ranks.h: registers that ranks pass to one another."""

    _fields_ = (("registers", P), ("first", I64), ("count", I32), ("pad", I32))


class OwnExpertsStruct(ctypes.Structure):
    """Mirrors the C struct OwnExperts of moe/own_experts.h."""

    _fields_ = (("slot_of", P), ("owners", P), *((name, I32) for name in ("slots", "owner", "layer", "pad")))


class LastOpsStruct(ctypes.Structure):
    """Mirrors the C struct LastOps of step/ranks/ranks.h."""

    _fields_ = (("registers", P), ("is_shared", P), ("begin", I64), ("count", I32), ("pad", I32))


class RankExpertsStruct(ctypes.Structure):
    """Mirrors the C struct RankExperts of step/ranks/ranks.h."""

    _fields_ = (("layer", BiasedMoeStruct), ("own", OwnExpertsStruct), ("gate_up", I64), ("down", I64))


class DealtLayer(NamedTuple):
    """Says which experts of a layer are here, and who computes their rows; the native step reads both."""

    slot_of: NDArray[np.int16]  # by expert: its place among the rank's weights, or EMPTY
    owners: NDArray[np.uint8]  # (experts x SHARES,)

    @classmethod
    def of(cls, op: p.OwnExperts) -> DealtLayer:
        """Returns the tables of a layer without copies."""
        slot_of = np.full(op.experts, EMPTY, np.int16)
        slot_of[op.first : op.first + op.count] = np.arange(op.count)
        return cls(slot_of, np.frombuffer(Placement.at_home(op.experts, op.ranks, 0).owners, np.uint8).copy())


class NativeRankProgram(NativeProgram):
    """One rank's share ``own`` of a program over pages of ``layout``, compiled to C structs, and the memory to
    which these point.
    """

    def __init__(self, own: RankProgram, weights: Weights, layout: KvLayout) -> None:
        self.own = own
        self.dealt: dict[str, DealtLayer] = {}  # by the name of the layer's first weight
        super().__init__(own.program, weights, layout=layout)
        shared = {self.registers[name] for name in own.widths}
        self._is_shared = np.array([number in shared for number in range(len(self.widths))], np.int32)
        self.vectors[own.head.norm] = vector(weights[own.head.norm])  # of hidden states that are asked for
        if own.head.norm_bias is not None:
            self.head_biases = self.head_biases._replace(of_norm=vector(weights[own.head.norm_bias]))
        self.state_bytes = state_bytes(layout)
        self.table_count = table_count(layout)
        self._op_tables = np.array(self.page_tables(), np.int32)
        written = [] if self.spans is None else joined(self.spans.written)
        self.own_states = np.array(written, np.int64).reshape(-1, 2)  # (stretches, begin and bytes) in a state
        self.carried = tuple(self._carried(residual) for residual in (own.given, own.handed))

    @property
    def op_tables(self) -> int | None:
        """Returns the address of one int32 per op, the page table that it uses; None if sequences have one."""
        return self._op_tables.ctypes.data if self.table_count > 1 else None

    def place_states(self, at: int, after: int) -> None:
        """Sets the addresses of the recurrent states of a step's items before and after the step, ``state_stride``
        bytes apart. Only ranks that divide a layer need two, because one may write what another still reads.
        """
        assert self.spans is not None
        self.spans.states.at, self.spans.states.bytes = at, self.state_stride
        self.spans.states.to = after if self.divides_states else None

    @property
    def divides_states(self) -> bool:
        """Returns whether several ranks have heads of the same recurrent layer."""
        return bool(self.state_bytes) and self.own.columns > 1

    @property
    def state_stride(self) -> int:
        """Returns the bytes between the states of two items in the ranks' memory, a multiple of 64."""
        return -(-self.state_bytes // ALIGN) * ALIGN

    def _given(self) -> dict[str, int]:
        return dict(zip(self.own.given.registers, self.own.given.widths, strict=True))

    def _carried(self, residual: Residual) -> CarriedRegisters:
        registers = np.array([self.registers[name] for name in residual.registers], np.int32)
        self._kept.append(registers)
        return CarriedRegisters(registers.ctypes.data, residual.first, len(registers), 0)

    @property
    def row_floats(self) -> int:
        """Returns the number of floats per row in the registers that only this rank uses."""
        return self._floats_before(len(self.widths), shared=False)

    def register(self, arena: Tensor, rows: int, name: str) -> Tensor:
        """Returns register ``name`` of the last step as a view of ``arena``, (rows, width); ``arena`` has either
        the own or the shared registers.
        """
        number = self.registers[name]
        at = rows * self._floats_before(number, bool(self._is_shared[number]))
        return arena[at : at + rows * self.widths[number]].view(rows, self.widths[number])

    def _floats_before(self, number: int, shared: bool) -> int:
        return sum(self.widths[at] for at in range(number) if self._is_shared[at] == shared)

    def last_ops(self) -> LastOpsStruct:
        """Returns which ops leave out rows that nobody reads; they begin behind all ops if none do."""
        found = self.own.last_ops
        if found is None:
            return LastOpsStruct(begin=len(self.ops))
        copied = np.array(sorted({self.registers[name] for name in found.read if name in self.registers}), np.int32)
        shared = self._is_shared.copy()
        shared[[self.registers[name] for name in found.shared]] = 0
        self._kept += (copied, shared)
        return LastOpsStruct(copied.ctypes.data, shared.ctypes.data, found.begin, len(copied), 0)

    @property
    def is_shared(self) -> int:
        """Returns the address of one int32 flag per register, 1 for those that all ranks fill."""
        return self._is_shared.ctypes.data

    def _register(self, name: str, width: int) -> int:
        part = self.own.parts.get(name)
        if part is None:
            return super()._register(name, width)
        self.registers[name] = super()._register(part.whole, self.own.widths[part.whole])
        return self.registers[name]

    def _compiled(self, op: p.Op) -> structs.Op:
        match op:
            case p.Meet():
                return self._meeting(op)
            case p.Exchange():
                return self._exchange(op)
            case p.OwnExperts():
                return self._own_experts(op)
            case p.MixExperts():
                return self._mix(op)
        found = super()._compiled(op)
        part = self.own.parts.get(getattr(op, "out", ""))
        if isinstance(op, p.Embedding):
            first, end = self.own.vocab
            found.delta, found.layer = first, end - first
        elif isinstance(op, p.LatentAttention | p.Gate | p.GatedDelta | p.StateSpace):
            found.layer = 0 if part is None else part.first
        elif part is not None:
            found.delta = part.first
        if isinstance(op, p.Adapt):
            found.layer += self.own.adapts_before
        return found

    def _head_site(self) -> int:
        return self.own.head_site

    def _sites_of_experts(self) -> dict[str, int]:
        return self.own.expert_sites

    def _meeting(self, op: p.Meet) -> structs.Op:
        part, given = self.own.parts.get(op.x), self.registers[op.x]
        found = structs.Op(kind=GATHER, input=given, output=self._register(op.out, self._width(op.x)))
        if part is not None:
            found.delta, found.layer, found.window = part.first, part.width, part.by_rows
        return found

    def _exchange(self, op: p.Exchange) -> structs.Op:
        return structs.Op(
            kind=EXCHANGE,
            input=self.registers[op.x],
            delta=self.registers[op.logits],
            output=self._register(op.rows, self._width(op.x)),
            layer=self._register(op.routes, self._width(op.logits)),
        )

    def _own_experts(self, op: p.OwnExperts) -> structs.Op:
        weights = self._weights[op.gate_up], self._weights[op.down]
        layer = experts_of(*weights, op.count + op.spare, op.chosen, op.renormalise)
        struct = self._own_layer(op, layer)
        self.experts[op.gate_up] = layer
        self._kept += (layer, struct)
        self._layers[op.gate_up] = ctypes.addressof(struct)
        return structs.Op(
            kind=EXPERTS if op.gate is None else BIASED_EXPERTS,
            input=self.registers[op.x],
            delta=self.registers[op.logits],
            output=self._register(op.out, 0),
            table=self._layers[op.gate_up],
        )

    def _own_layer(self, op: p.OwnExperts, layer: AnyExperts) -> RankExpertsStruct:
        """Returns the struct of own experts; its count includes all that the router ranks, its weights begin with
        the first own one.
        """
        plain, dealt = layer.struct, DealtLayer.of(op)
        plain.experts = op.experts
        self.dealt[op.gate_up] = dealt
        addresses = dealt.slot_of.ctypes.data, dealt.owners.ctypes.data
        own = OwnExpertsStruct(*addresses, op.count + op.spare, op.rank, op.layer, 0)
        sites = [self._expert_sites[name] if self._adapts else -1 for name in (op.gate_up, op.down)]
        if op.gate is None:
            return RankExpertsStruct(BiasedMoeStruct(plain, None, None, 0.0, 0.0), own, *sites)
        biases = self._floats(op.gate.gate_up_bias), self._floats(op.gate.down_bias)
        return RankExpertsStruct(BiasedMoeStruct(plain, *biases, op.gate.alpha, op.gate.limit), own, *sites)

    def _mix(self, op: p.MixExperts) -> structs.Op:
        return structs.Op(
            kind=MIX,
            input=self.registers[op.y],
            delta=self.registers[op.logits],
            output=self._register(op.out, self._width("x")),
            table=self._layers[op.gate_up],
        )
