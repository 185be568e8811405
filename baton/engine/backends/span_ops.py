"""Computes ops of latents, routing, recurrent state and further norms by torch; the native ones' reference.

Knows nothing of schedulers or of how the other ops run: a backend calls these between its own ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.backends.spans import Read, RotaryTables, Span, SpanOp, StepSpans, rows_of
from baton.engine.backends.stream_ops import STREAM_OPS, bind_stream_op, stream_outputs
from baton.engine.program import rope
from baton.engine.program.ops import (
    Activate,
    Center,
    Combine,
    Convolve,
    Divide,
    Gate,
    GatedDelta,
    GatedHeads,
    HalveHeads,
    LatentAttention,
    LayerNorm,
    Op,
    RmsNorm,
    RotateHeads,
    Route,
    RouteTwo,
    ScaleRows,
    SelectiveScan,
    StateSpace,
    TemperQueries,
)
from baton.engine.program.program import Program
from baton.kernels.activate.reference import activate
from baton.kernels.halve_heads.reference import halve_heads, temper_queries
from baton.kernels.latent_attention.reference import latent_rows, rotate_heads
from baton.kernels.layer_norm.reference import center
from baton.kernels.registry import kernels
from baton.kernels.rms_norm.reference import normed
from baton.kernels.rope_append.reference import rotate
from baton.kernels.selective_scan.reference import convolve_by_taps
from baton.kv.layout.page import group_bytes, plane_bytes
from baton.kv.layout.state import plane_bytes as plane_bytes_of
from baton.kv.layout.state import state_offsets
from baton.protos.errors import ConfigError
from baton.protos.nouns import KvLayout

SILU = "silu"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class SpanOps:
    """Computes such ops of a program, with its weights, over pages of ``layout``."""

    def __init__(self, program: Program, weights: Mapping[str, object], layout: KvLayout) -> None:
        self._program, self._weights, self._layout = program, weights, layout
        self._kernels = kernels()
        self._rope_angles = RotaryTables(*rope.frequencies(program.rope, program.rotated, program.max_position))

    def bind(self, op: Op) -> SpanOp:
        """Returns a function that computes ``op``: from registers, read by name, and spans to the outputs by
        register name.

        Raises ConfigError for a KV dtype that the op can't read.
        """
        return _BINDERS[type(op)](self, op)

    def _tensor(self, name: str | None) -> Tensor | None:
        if name is None:
            return None
        found = self._weights[name]
        assert isinstance(found, Tensor), f"{name} is never packed"
        return found

    def _rms_norm(self, op: RmsNorm) -> SpanOp:
        weight = self._tensor(op.weight)
        assert weight is not None
        assert op.delta is None, "only the residual stream has something to add"

        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            x = read(op.x)
            return {op.out: self._kernels.rms_norm(x, None, weight.to(x.dtype), op.eps)[1]}

        return run

    def _route(self, op: Route) -> SpanOp:
        bias = self._tensor(op.bias)

        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            of = op.scoring, op.chosen, op.groups, op.kept, op.best, op.renormalise, op.scale
            found, factor = self._kernels.route(read(op.logits), bias, *of)
            return {op.out: found, op.factor: factor}

        return run

    def _combine(self, op: Combine) -> SpanOp:
        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            factor, gate = (None if name is None else read(name) for name in (op.factor, op.gate))
            return {op.out: self._kernels.combine(read(op.mixed), factor, read(op.shared), gate)}

        return run

    def _latent_attention(self, op: LatentAttention) -> SpanOp:
        norm, expand = self._tensor(op.norm), self._tensor(op.expand)
        assert norm is not None
        assert expand is not None
        heads = expand.view(-1, op.nope_dim + op.value_dim, op.rank)
        at, size = plane_place(self._layout, op.layer)
        if self._layout.dtype not in DTYPES:
            text = f"KV as {self._layout.dtype} isn't known for latents; use auto, float32 or bf16"
            raise ConfigError(text, "kv_cache_dtype")
        stored = DTYPES[self._layout.dtype]

        def attend(q: Tensor, latent: Tensor, span: Span, spans: StepSpans) -> Tensor:
            cos, sin = (table.to(q.dtype) for table in self._rope_angles.of(span))
            rows = latent_rows(latent, norm.to(latent.dtype), op.eps, cos, sin, op.paired)
            spans.store(span, at, size, rows.to(stored))
            asked = torch.cat((q[..., : op.nope_dim], rotate_heads(q[..., op.nope_dim :], cos, sin, op.paired)), -1)
            kept = spans.rows_of(span, at, size, stored)
            found: Tensor = self._kernels.latent_attention(asked, kept, span.start, heads, op.rank, op.scale)
            return found.flatten(1)

        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            q, latent = read(op.q), read(op.latent)
            out = q.new_zeros(len(q), len(heads) * op.value_dim)
            for span in spans.spans:
                asked = q[span.rows].unflatten(1, (len(heads), -1))
                out[span.rows] = attend(asked, latent[span.rows], span, spans)
            return {op.out: out}

        return run

    def _gated_heads(self, op: GatedHeads) -> SpanOp:
        heads, width = self._program.heads, self._program.head_dim

        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            rows = read(op.x)
            q, gate = rows[:, : 2 * heads * width].unflatten(1, (heads, 2, width)).unbind(2)
            return {op.out: torch.cat((q.flatten(1), rows[:, 2 * heads * width :]), 1), op.gate: gate.flatten(1)}

        return run

    def _gate(self, op: Gate) -> SpanOp:
        return lambda read, spans: {op.out: read(op.gate).sigmoid() * read(op.x)}

    def _gated_delta(self, op: GatedDelta) -> SpanOp:
        names = op.conv, op.a_log, op.dt_bias, op.norm
        found = [self._tensor(name) for name in names]
        conv, a_log, dt_bias, norm = (tensor.float() for tensor in found if tensor is not None)
        conv = conv.flatten(1)
        past, state = (state_place(self._layout, name, op.layer) for name in ("conv", "delta"))

        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            rows, (mixed, z, b, a) = read(op.mixed), delta_parts(read(op.mixed).float(), read(op.gates).float(), op)
            beta, decay = b.sigmoid(), -a_log.exp() * F.softplus(a + dt_bias)
            out = rows.new_zeros(len(rows), op.value_heads, op.value_dim)
            for batch in spans.batches:
                at, kept = rows_of(batch), (spans.state(batch, *past), spans.state(batch, *state))
                found = self._kernels.gated_delta(mixed[at], beta[at], decay[at], conv, *kept, op.key_heads)
                out[at] = (normed(found, norm, op.eps) * F.silu(z[at])).to(rows.dtype)
            return {op.out: out.flatten(1)}

        return run

    def _state_space(self, op: StateSpace) -> SpanOp:
        found = [self._tensor(name) for name in (op.conv, op.a_log, op.skip, op.dt_bias, op.norm)]
        conv, a_log, skip, dt_bias, norm = (tensor.float() for tensor in found if tensor is not None)
        bias = self._tensor(op.conv_bias)
        fixed = -a_log.exp(), skip, conv.flatten(1), None if bias is None else bias.float()
        past, state = (state_place(self._layout, name, op.layer) for name in ("conv", "ssm"))
        inner = op.heads * op.head_dim
        sizes = inner, inner + 2 * op.groups * op.size, op.heads

        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            rows = read(op.mixed)
            gate, mixed, dt = rows.float().split(sizes, -1)
            steps = F.softplus(dt + dt_bias)
            out = rows.new_zeros(len(rows), inner)
            for batch in spans.batches:
                at, kept = rows_of(batch), (spans.state(batch, *past), spans.state(batch, *state))
                found = self._kernels.state_space(mixed[at], steps[at], *fixed, *kept, op.groups)
                gated = (found.flatten(1) * F.silu(gate[at])).unflatten(1, (op.groups, -1))
                out[at] = normed(gated, norm.view(op.groups, -1), op.eps).flatten(1).to(rows.dtype)
            return {op.out: out}

        return run

    def _halve_heads(self, op: HalveHeads) -> SpanOp:
        heads, width = self._program.heads + self._program.kv_heads, self._program.head_dim
        return lambda read, spans: {op.out: halve_heads(read(op.x), heads, width, op.width)}

    def _temper_queries(self, op: TemperQueries) -> SpanOp:
        queries = self._program.heads * self._program.head_dim

        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            rows = read(op.x).clone()
            for span in spans.spans:
                temper_queries(rows[span.rows], queries, span.start, op.scale, op.floor, op.shift)
            return {op.out: rows}

        return run

    def _center(self, op: Center) -> SpanOp:
        return lambda read, spans: {op.out: center(read(op.x))}

    def _activate(self, op: Activate) -> SpanOp:
        assert not op.gated, "gated ones have ops of their own"
        return lambda read, spans: {op.out: activate(read(op.x), op.activation)}

    def _scale_rows(self, op: ScaleRows) -> SpanOp:
        return lambda read, spans: {op.out: read(op.x) * read(op.factor)}

    def _layer_norm(self, op: LayerNorm) -> SpanOp:
        weight, bias = self._tensor(op.weight), self._tensor(op.bias)
        assert weight is not None

        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            delta = None if op.delta is None else read(op.delta)
            x, found = self._kernels.layer_norm(read(op.x), delta, weight, bias, op.eps)
            return {op.x: x, op.out: found}

        return run

    def _rotate_heads(self, op: RotateHeads) -> SpanOp:
        width, rotated = self._program.head_dim, self._program.heads + self._program.kv_heads

        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            rows = read(op.x).clone()
            heads = rows[:, : rotated * width].unflatten(1, (rotated, width))
            for span in spans.spans:
                cos, sin = (table.to(rows.dtype) for table in self._rope_angles.of(span))
                heads[span.rows] = rotate(heads[span.rows], cos, sin)
            return {op.out: rows}

        return run

    def _route_two(self, op: RouteTwo) -> SpanOp:
        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            found, factor = self._kernels.route_two(read(op.logits), op.jitter)
            return {op.out: found, op.factor: factor}

        return run

    def _convolve(self, op: Convolve) -> SpanOp:
        conv, bias = self._tensor(op.conv), self._tensor(op.conv_bias)
        assert conv is not None
        taps, past = conv.float().flatten(1), state_place(self._layout, "conv", op.layer)

        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            rows = read(op.x)[:, : op.width].float()
            out = rows.new_zeros(rows.shape)
            for batch in spans.batches:
                at = rows_of(batch)
                found = convolve_by_taps(rows[at], taps, spans.state(batch, *past))
                out[at] = activate(found if bias is None else found + bias.float(), SILU)
            return {op.out: out.to(read(op.x).dtype)}

        return run

    def _divide(self, op: Divide) -> SpanOp:
        return lambda read, spans: dict(zip(op.outs, read(op.x).split(op.widths, -1), strict=True))

    def _selective_scan(self, op: SelectiveScan) -> SpanOp:
        a_log, skip = self._tensor(op.a_log), self._tensor(op.skip)
        assert a_log is not None
        assert skip is not None
        fade, own, place = -a_log.float().exp(), skip.float(), state_place(self._layout, "ssm", op.layer)

        def run(read: Read, spans: StepSpans) -> dict[str, Tensor]:
            x, dt, b, c = (read(name).float() for name in (op.x, op.dt, op.b, op.c))
            gate, out = read(op.gated)[:, -x.shape[1] :].float(), x.new_zeros(x.shape)
            for batch in spans.batches:
                at, state = rows_of(batch), spans.state(batch, *place)
                out[at] = self._kernels.selective_scan(x[at], dt[at], b[at], c[at], fade, own, state)
            return {op.out: (out * activate(gate, SILU)).to(read(op.x).dtype)}

        return run

    def _stream(self, op: Op) -> SpanOp:
        return bind_stream_op(op, self._tensor, self._program)


_BINDERS: dict[type, Callable[[SpanOps, Any], SpanOp]] = {
    RmsNorm: SpanOps._rms_norm,
    Route: SpanOps._route,
    Combine: SpanOps._combine,
    LatentAttention: SpanOps._latent_attention,
    GatedHeads: SpanOps._gated_heads,
    Gate: SpanOps._gate,
    GatedDelta: SpanOps._gated_delta,
    StateSpace: SpanOps._state_space,
    HalveHeads: SpanOps._halve_heads,
    TemperQueries: SpanOps._temper_queries,
    Center: SpanOps._center,
    ScaleRows: SpanOps._scale_rows,
    Activate: SpanOps._activate,
    LayerNorm: SpanOps._layer_norm,
    RotateHeads: SpanOps._rotate_heads,
    RouteTwo: SpanOps._route_two,
    Convolve: SpanOps._convolve,
    Divide: SpanOps._divide,
    SelectiveScan: SpanOps._selective_scan,
    **dict.fromkeys(STREAM_OPS, SpanOps._stream),
}

SPAN_OPS = tuple(kind for kind in _BINDERS if kind is not RmsNorm)
# Those that read more of a sequence than its rows and their positions, other than attention to K and V.
SEQUENCE_OPS = (LatentAttention, GatedDelta, StateSpace, Convolve, SelectiveScan)


def state_place(layout: KvLayout, name: str, layer: int) -> tuple[int, tuple[int, ...]]:
    """Returns the byte offset of plane ``name`` of ``layer`` in a sequence's recurrent state, and the plane's
    shape.
    """
    plane = next(plane for plane in layout.states if plane.name == name)
    return state_offsets(layout)[name] + layer * plane_bytes_of(plane) // plane.layers, plane.shape


def plane_place(layout: KvLayout, layer: int) -> tuple[int, int]:
    """Returns the byte offset of the only plane of ``layer`` in a page of 16 tokens, and its size in bytes."""
    at = 0
    for group in layout.groups:
        if layer < group.layers:
            return at + layer * plane_bytes(layout.dtype, group), plane_bytes(layout.dtype, group)
        layer, at = layer - group.layers, at + group_bytes(layout.dtype, group)
    raise AssertionError("a layer that no group holds")


def delta_parts(mixed: Tensor, gates: Tensor, op: GatedDelta) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns, from the projections of a gated delta layer, q, k and v side by side, z (rows, value_heads,
    value_dim), b and a (rows, value_heads).
    """
    each = op.value_heads // op.key_heads
    groups = op.key_heads if op.grouped else 1
    per = op.key_heads // groups
    sizes = per * op.key_dim, per * op.key_dim, per * each * op.value_dim, per * each * op.value_dim
    q, k, v, z = mixed.unflatten(1, (groups, -1)).split(sizes, -1)
    b, a = gates.unflatten(1, (groups, -1)).chunk(2, -1)
    shape = (op.value_heads, op.value_dim)
    return (
        torch.cat([x.flatten(1) for x in (q, k, v)], 1),
        z.flatten(1).unflatten(1, shape),
        b.flatten(1),
        a.flatten(1),
    )


def outputs(op: Op, width: Callable[[str], int], heads: int) -> dict[str, int]:
    """Returns the registers that ``op`` writes, with the number of elements in a row of each.

    ``width`` returns that number for the registers that it reads; ``heads`` is that of all query heads together.
    """
    if isinstance(op, STREAM_OPS):
        return stream_outputs(op, width)
    match op:
        case RmsNorm():
            return {op.out: width(op.x)}
        case Route() | RouteTwo():
            return {op.out: op.experts, op.factor: 1}
        case Combine():
            return {op.out: width(op.shared)}
        case LatentAttention():
            return {op.out: width(op.q) // (op.nope_dim + op.rope_dim) * op.value_dim}
        case GatedHeads():
            return {op.out: width(op.x) - heads, op.gate: heads}
        case (
            Activate()
            | Gate()
            | HalveHeads()
            | TemperQueries()
            | Center()
            | ScaleRows()
            | LayerNorm()
            | RotateHeads()
        ):
            return {op.out: width(op.x)}
        case Convolve():
            return {op.out: op.width}
        case Divide():
            return dict(zip(op.outs, op.widths, strict=True))
        case SelectiveScan():
            return {op.out: width(op.dt)}
        case GatedDelta():
            return {op.out: op.value_heads * op.value_dim}
        case StateSpace():
            return {op.out: op.heads * op.head_dim}
    raise AssertionError(f"{type(op).__name__} is no op of these")
