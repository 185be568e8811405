"""Compiles ops of several residual streams, of layers' own inputs and of queries alone for the native step.

Knows nothing of plans. Vectors and streams' small matrices become float32; a table of inputs keeps its dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.backends.native import span_structs as s
from baton.engine.program import ops as p
from baton.engine.program.rope import RopeTables
from baton.kernels.step.structs import Op

TABLES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # common.h: Dtype; embedding/cpu.cpp


class Compiler(Protocol):
    """The parts of a native program's compiler that these ops use."""

    @property
    def rope(self) -> RopeTables:
        """Returns the tables of all rotary embeddings."""

    def at(self, name: str | None) -> int:
        """Returns the index of register ``name``, -1 for None."""

    def tensor(self, name: str) -> Tensor:
        """Returns the weight ``name``, which is never packed."""

    def place(self, tensor: Tensor) -> int:
        """Keeps ``tensor`` and returns its address."""

    def floats(self, name: str | None) -> int | None:
        """Returns the address of the weight ``name`` as float32."""

    def keep_struct(self, struct: ctypes.Structure) -> int:
        """Keeps ``struct`` alive and returns its address."""

    def registers(self, names: tuple[str, ...]) -> s.RegistersStruct:
        """Returns the struct of a list of registers."""


def stream_op(op: p.Op, to: Compiler) -> Op:
    """Returns ``op`` in the native step's form, with what it points to kept by ``to``."""
    return _COMPILERS[type(op)](op, to)


def _layer_inputs(op: p.LayerInputs, to: Compiler) -> Op:
    table = to.tensor(op.table)
    table = table if table.dtype in TABLES else table.float()
    sizes = len(table), table.shape[1] // op.width, op.width
    kind = TABLES[table.dtype], op.eps, op.scale
    struct = s.LayerInputsStruct(to.place(table), to.floats(op.norm), *sizes, *kind)
    return Op(kind=s.LAYER_INPUTS, input=to.at(op.x), output=to.at(op.out), table=to.keep_struct(struct))


def _gate_inputs(op: p.GateInputs, to: Compiler) -> Op:
    return Op(s.GATE_INPUTS, to.at(op.x), to.at(op.inputs), to.at(op.out), op.first)


def _sparsen(op: p.Sparsen, to: Compiler) -> Op:
    return Op(kind=s.SPARSEN, input=to.at(op.x), output=to.at(op.out), eps=op.deviations)


def _match_size(op: p.MatchSize, to: Compiler) -> Op:
    return Op(s.MATCH_SIZE, to.at(op.x), to.at(op.streams), to.at(op.out))


def _sum_rows(op: p.SumRows, to: Compiler) -> Op:
    table = to.keep_struct(to.registers(op.xs))
    return Op(kind=s.SUM_ROWS, output=to.at(op.out), eps=op.scale, table=table)


def _predict_streams(op: p.PredictStreams, to: Compiler) -> Op:
    table = to.keep_struct(_mix(op, to, None))
    return Op(s.PREDICT_STREAMS, to.at(op.x), to.at(op.streams), table=table)


def _correct_streams(op: p.CorrectStreams, to: Compiler) -> Op:
    table = to.keep_struct(_mix(op, to, op.gain))
    return Op(s.CORRECT_STREAMS, to.at(op.y), to.at(op.x), to.at(op.out), to.at(op.streams), table=table)


def _mix(op: p.PredictStreams | p.CorrectStreams, to: Compiler, gain: str | None) -> s.StreamMixStruct:
    count, width = to.tensor(op.router).shape
    assert count <= s.MOST_STREAMS, "the model's file refuses more"
    weights = (to.floats(name) for name in (op.norm, op.router, op.mix, gain))
    return s.StreamMixStruct(*weights, count, width, op.eps)


def _add_to_each(op: p.AddToEach, to: Compiler) -> Op:
    return Op(s.ADD_TO_EACH, to.at(op.streams), to.at(op.delta))


def _rotate_queries(op: p.RotateQueries, to: Compiler) -> Op:
    at = to.at(op.x), to.rope.offsets[op.rope], to.at(op.out)
    width = to.rope.rotated[op.rope]
    return Op(s.ROTATE_QUERIES, *at, window=width, norm=to.floats(op.norm), eps=op.eps)


_COMPILERS: dict[type, Callable[..., Op]] = {
    p.LayerInputs: _layer_inputs,
    p.GateInputs: _gate_inputs,
    p.Sparsen: _sparsen,
    p.MatchSize: _match_size,
    p.SumRows: _sum_rows,
    p.PredictStreams: _predict_streams,
    p.CorrectStreams: _correct_streams,
    p.AddToEach: _add_to_each,
    p.RotateQueries: _rotate_queries,
}
