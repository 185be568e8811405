"""Holds one rank's experts of every layer: its own, and copies of other ranks' experts in spare places.

Knows nothing of loads. Between two steps the lead sends a note with a layer's new placement; the rank reads the
copies' weights from where it read its own at start, and then computes the rows that the placement says.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from baton.engine.backends.ranks.notes import ExpertsNote
from baton.engine.backends.ranks.placement import EMPTY
from baton.engine.backends.ranks.program import DealtLayer, NativeRankProgram
from baton.engine.checkpoints.weights import RowSource
from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.kernels.linear.packed import PackedWeight, one_of
from baton.kernels.linear.packed_floats import pack_floats
from baton.kernels.moe.native import AnyExperts

PARTS = ("data", "scales", "mins", "row_scale")  # of a packed weight, which experts have each their own of


class _Layer(NamedTuple):
    """Holds one layer of experts, and what its spare places hold."""

    op: p.OwnExperts
    experts: AnyExperts
    dealt: DealtLayer
    held: list[int]


class OwnExpertLayers:
    """Holds the experts of a compiled share ``native`` of ``program``; ``rows_of`` reads weights, None if there are
    no spare places.
    """

    def __init__(self, native: NativeRankProgram, program: Program, rows_of: RowSource | None) -> None:
        self._native, self._rows_of = native, rows_of
        self._rows = {weight.name: sum(shape[0] for shape in weight.shapes) for weight in program.weights}
        ops = (op for op in native.own.program.ops if isinstance(op, p.OwnExperts))
        self._layers = {op.layer: self._layer(op) for op in ops}

    def _layer(self, op: p.OwnExperts) -> _Layer:
        name = op.gate_up
        return _Layer(op, self._native.experts[name], self._native.dealt[name], [EMPTY] * op.spare)

    def place(self, note: ExpertsNote) -> None:
        """Reads the copies that this rank is to have of the note's layer, and deals rows as it says; does nothing
        for a layer of another stage.
        """
        layer = self._layers.get(note.layer)
        if layer is None:
            return
        for place, expert in enumerate(note.placement.held[layer.op.rank]):
            if expert != layer.held[place]:
                self._fill(layer, place, expert)
        layer.dealt.owners[:] = np.frombuffer(note.placement.owners, np.uint8)

    def _fill(self, layer: _Layer, place: int, expert: int) -> None:
        op, slot = layer.op, layer.op.count + place
        if layer.held[place] != EMPTY:
            layer.dealt.slot_of[layer.held[place]] = EMPTY
        for name, into in ((op.gate_up, layer.experts.gate_up), (op.down, layer.experts.down)):
            _copy(self._read(name, op, expert), into, slot, op.count + op.spare)
        if op.gate is not None:
            for name in (op.gate.gate_up_bias, op.gate.down_bias):
                bias, own = self._read(name, op, expert), self._native.vectors[name]
                assert isinstance(bias, Tensor)
                own.view(op.count + op.spare, -1)[slot].copy_(bias.float())
        layer.dealt.slot_of[expert], layer.held[place] = slot, expert

    def _read(self, name: str, op: p.OwnExperts, expert: int) -> Tensor | PackedWeight:
        assert self._rows_of is not None, "there are spare places"
        each = self._rows[name] // op.experts
        return self._rows_of(name, ((expert * each, (expert + 1) * each),))


def _copy(weight: Tensor | PackedWeight, into: Tensor | PackedWeight, slot: int, slots: int) -> None:
    """Overwrites the expert at ``slot`` of a layer's matrix, which has ``slots`` experts, by ``weight``."""
    if isinstance(into, Tensor):
        assert isinstance(weight, Tensor)
        into[slot].copy_(weight.view_as(into[slot]))
        return
    packed = pack_floats(weight) if isinstance(weight, Tensor) else weight
    place = one_of(into, slot, slots, packed.n)
    for part in (*PARTS, "table") if place.is_ordered else PARTS:
        theirs, own = getattr(packed, part), getattr(place, part)
        if own is not None:
            own.copy_(theirs.view_as(own))
