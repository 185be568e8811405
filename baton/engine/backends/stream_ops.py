"""Computes ops of several residual streams, of layers' own inputs and of queries alone by torch; the native ones'
reference.

Knows nothing of schedulers or of how the other ops run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.backends.spans import Read, RotaryTables, SpanOp, StepSpans
from baton.engine.program import rope
from baton.engine.program.ops import (
    AddToEach,
    CorrectStreams,
    GateInputs,
    LayerInputs,
    MatchSize,
    Op,
    PredictStreams,
    RotateQueries,
    Sparsen,
    SumRows,
)
from baton.engine.program.program import Program
from baton.kernels.layer_inputs.reference import gate_inputs, layer_inputs, sparsen
from baton.kernels.predict_streams.reference import (
    add_to_each,
    correct_streams,
    match_size,
    predict_streams,
    router_modes,
)
from baton.kernels.rms_norm.reference import normed
from baton.kernels.rope_append.reference import rotate

Weight = Callable[[str | None], Tensor | None]
Outputs = dict[str, Tensor]


class _Context(NamedTuple):
    """Declares what an op is bound to: weights by name, and the program."""

    weight: Weight
    program: Program

    def need(self, name: str) -> Tensor:
        found = self.weight(name)
        assert found is not None
        return found


def bind_stream_op(op: Op, weight: Weight, program: Program) -> SpanOp:
    """Returns a function that computes ``op``, one of ``STREAM_OPS``, with weights by name."""
    return _BINDERS[type(op)](op, _Context(weight, program))


def _layer_inputs(op: LayerInputs, of: _Context) -> SpanOp:
    table, norm = of.need(op.table), of.need(op.norm)

    def run(read: Read, spans: StepSpans) -> Outputs:
        assert spans.tokens is not None
        return {op.out: layer_inputs(read(op.x), spans.tokens.long(), table, norm, op.eps, op.scale)}

    return run


def _gate_inputs(op: GateInputs, of: _Context) -> SpanOp:
    return lambda read, spans: {op.out: gate_inputs(read(op.x), read(op.inputs), op.first)}


def _sparsen(op: Sparsen, of: _Context) -> SpanOp:
    return lambda read, spans: {op.out: sparsen(read(op.x), op.deviations)}


def _match_size(op: MatchSize, of: _Context) -> SpanOp:
    return lambda read, spans: {op.out: match_size(read(op.x), read(op.streams))}


def _sum_rows(op: SumRows, of: _Context) -> SpanOp:
    return lambda read, spans: {op.out: torch.stack([read(x) for x in op.xs]).sum(0) * op.scale}


def _predict_streams(op: PredictStreams, of: _Context) -> SpanOp:
    norm, router, mix = of.need(op.norm), of.need(op.router), of.need(op.mix)

    def run(read: Read, spans: StepSpans) -> Outputs:
        x = read(op.x)
        found = predict_streams(x, read(op.streams), router_modes(x, norm, router, op.eps), mix)
        return dict(zip((op.x, op.streams), found, strict=True))

    return run


def _correct_streams(op: CorrectStreams, of: _Context) -> SpanOp:
    norm, router, mix, gain = of.need(op.norm), of.need(op.router), of.need(op.mix), of.weight(op.gain)

    def run(read: Read, spans: StepSpans) -> Outputs:
        modes = router_modes(read(op.y), norm, router, op.eps)
        x, streams = correct_streams(read(op.x), read(op.streams), read(op.y), modes, mix)
        return {op.x: x, op.streams: streams, op.out: x if gain is None else x * gain.to(x.dtype)}

    return run


def _add_to_each(op: AddToEach, of: _Context) -> SpanOp:
    return lambda read, spans: {op.streams: add_to_each(read(op.streams), read(op.delta))}


def _rotate_queries(op: RotateQueries, of: _Context) -> SpanOp:
    m, norm = of.program, of.weight(op.norm)
    angles = RotaryTables(*rope.frequencies(m.ropes[op.rope], m.rotated, m.max_position))

    def run(read: Read, spans: StepSpans) -> Outputs:
        heads = read(op.x).unflatten(1, (m.heads, m.head_dim)).clone()
        if norm is not None:
            heads = normed(heads, norm, op.eps)
        for span in spans.spans:
            cos, sin = (table.to(heads.dtype) for table in angles.of(span))
            heads[span.rows] = rotate(heads[span.rows], cos, sin)
        return {op.out: heads.flatten(1)}

    return run


_BINDERS: dict[type, Callable[..., SpanOp]] = {
    LayerInputs: _layer_inputs,
    GateInputs: _gate_inputs,
    Sparsen: _sparsen,
    MatchSize: _match_size,
    SumRows: _sum_rows,
    PredictStreams: _predict_streams,
    CorrectStreams: _correct_streams,
    AddToEach: _add_to_each,
    RotateQueries: _rotate_queries,
}
STREAM_OPS = tuple(_BINDERS)


def stream_outputs(op: Op, width: Callable[[str], int]) -> dict[str, int]:
    """Returns the registers that ``op``, one of ``STREAM_OPS``, writes, with the number of elements in a row of
    each.

    ``width`` returns that number for the registers that it reads.
    """
    match op:
        case LayerInputs() | GateInputs() | Sparsen() | RotateQueries():
            return {op.out: width(op.x)}
        case MatchSize():
            return {op.out: width(op.streams)}
        case SumRows():
            return {op.out: width(op.xs[0])}
        case PredictStreams():
            return {op.x: width(op.x), op.streams: width(op.streams)}
        case CorrectStreams():
            return {op.x: width(op.x), op.streams: width(op.streams), op.out: width(op.x)}
        case AddToEach():
            return {op.streams: width(op.streams)}
    raise AssertionError(f"{type(op).__name__} is no op of these")
