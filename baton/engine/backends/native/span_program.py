"""Compiles ops of latent attention, routing, recurrent state and further norms for the native step.

Knows nothing of plans. Vectors become float32; a latent's expansion keeps the dtype in which it was loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from baton.engine.backends.native import span_structs as s
from baton.engine.backends.native.stream_program import stream_op
from baton.engine.backends.span_ops import DTYPES, outputs, plane_place, state_place
from baton.engine.backends.stream_ops import STREAM_OPS
from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.rope import RopeTables
from baton.kernels.linear.packed import PackedWeight
from baton.kernels.step.structs import KV_TYPES, Op
from baton.protos.errors import ConfigError
from baton.protos.nouns import KvLayout

EXPANSIONS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # common.h: Dtype; latent.h: EXPAND_F16


class Registers(Protocol):
    """The parts of a native program that the compiler uses."""

    program: Program
    rope: RopeTables
    registers: dict[str, int]  # indices of registers by name

    def width_of(self, name: str) -> int:
        """Returns the number of floats in a row of register ``name``."""

    def make_register(self, name: str, width: int) -> int:
        """Returns the index of register ``name``, which an op writes; creates it with ``width`` floats per row if
        it is new.
        """

    def keep_struct(self, struct: ctypes.Structure) -> int:
        """Keeps ``struct`` alive and returns its address."""


class SpanCompiler:
    """Compiles ops of latent attention, routing, recurrent state and further norms of one program.

    ``tensors`` has the weights that the ops take, by name, for another program over them. ``states`` is the C
    struct with the place of the states in each step, ``written`` the stretches (begin, bytes) of a sequence's state
    that the ops write.
    """

    def __init__(self, to: Registers, weights: dict[str, Tensor | PackedWeight], layout: KvLayout) -> None:
        self._to, self._weights, self._layout = to, weights, layout
        self.tensors: dict[str, Tensor | PackedWeight] = {}
        self._kept: list[Tensor] = []
        self.states = s.StatesStruct(None, 0)
        self.written: list[tuple[int, int]] = []

    def compiled(self, op: p.Op) -> Op:
        """Returns ``op`` in the native step's form. Raises ConfigError for a KV dtype that it can't read."""
        heads = self._to.program.heads * self._to.program.head_dim
        for name, width in outputs(op, self._to.width_of, heads).items():
            self._to.make_register(name, width)
        return _COMPILERS[type(op)](self, op)

    @property
    def rope(self) -> RopeTables:
        """Returns the tables of all rotary embeddings."""
        return self._to.rope

    def at(self, name: str | None) -> int:
        """Returns the index of register ``name``, -1 for None."""
        return -1 if name is None else self._to.registers[name]

    def tensor(self, name: str) -> Tensor:
        """Returns the weight ``name``, which is never packed."""
        found = self._weights[name]
        assert isinstance(found, Tensor), f"{name} is never packed"
        self.tensors[name] = found
        return found

    def place(self, tensor: Tensor) -> int:
        """Keeps ``tensor`` and returns its address."""
        kept = tensor.contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def floats(self, name: str | None) -> int | None:
        """Returns the address of the weight ``name`` as float32, None for None."""
        return None if name is None else self.place(self.tensor(name).float())

    def _norm_rows(self, op: p.RmsNorm) -> Op:
        norm = self.floats(op.weight)
        return Op(kind=s.NORM_ROWS, input=self.at(op.x), output=self.at(op.out), norm=norm, eps=op.eps)

    def _latent(self, op: p.LatentAttention) -> Op:
        dtype = self._layout.dtype
        if dtype not in DTYPES:
            text = f"KV as {dtype} isn't known for latents; use auto, float32 or bf16"
            raise ConfigError(text, "kv_cache_dtype")
        expand = self.tensor(op.expand)
        expand = expand if expand.dtype in EXPANSIONS else expand.float()
        heads = expand.numel() // op.rank // (op.nope_dim + op.value_dim)
        struct = s.LatentStruct(
            self.floats(op.norm),
            self.place(expand),
            plane_place(self._layout, op.layer)[0],
            EXPANSIONS[expand.dtype],
            KV_TYPES[dtype],
            *(heads, op.nope_dim, op.rope_dim, op.value_dim, op.rank, op.paired, op.eps, op.scale),
        )
        return self._op(s.LATENT, struct, op.q, op.latent, op.out)

    def _route(self, op: p.Route) -> Op:
        sizes = op.experts, op.chosen, op.groups, op.kept, op.best, op.scoring == "sigmoid", op.renormalise
        struct = s.RouteStruct(self.floats(op.bias), *sizes, op.scale)
        return self._op(s.ROUTE, struct, op.logits, op.factor, op.out)

    def _combine(self, op: p.Combine) -> Op:
        registers = self.at(op.factor), self.at(op.gate)
        at = self.at(op.mixed), self.at(op.shared), self.at(op.out)
        return Op(s.COMBINE, *at, *registers)

    def _gated_heads(self, op: p.GatedHeads) -> Op:
        m = self._to.program
        return Op(s.GATED_HEADS, self.at(op.x), self.at(op.gate), self.at(op.out), m.heads, m.head_dim)

    def _gate(self, op: p.Gate) -> Op:
        return Op(s.GATE, self.at(op.x), self.at(op.gate), self.at(op.out))

    def _gated_delta(self, op: p.GatedDelta) -> Op:
        taps = self.tensor(op.conv).float().flatten(1)
        keys, first = op.key_heads * op.key_dim, op.first_key_head * op.value_heads // op.key_heads
        others = ((op.all_key_heads or op.key_heads) - op.key_heads) * op.key_dim  # of q, and of k
        begin = op.first_key_head * op.key_dim
        shifts = begin, others + begin, 2 * others + first * op.value_dim
        struct = s.GatedDeltaStruct(
            ctypes.addressof(self.states),
            self.place(taps.T),
            self.place(self.tensor(op.a_log).float().exp()),
            *(self.floats(op.dt_bias), self.floats(op.norm)),
            state_place(self._layout, "conv", op.layer)[0],
            state_place(self._layout, "delta", op.layer)[0] + 4 * first * op.key_dim * op.value_dim,
            *(taps.shape[1], op.key_heads, op.value_heads, op.key_dim, op.value_dim, op.grouped),
            op.eps,
            self._to.width_of(op.out),
            s.ChannelPlaces((keys, keys), shifts),
        )
        self._writes(struct, taps, 4 * op.value_heads * op.key_dim * op.value_dim)
        return self._op(s.GATED_DELTA, struct, op.mixed, op.gates, op.out)

    def _state_space(self, op: p.StateSpace) -> Op:
        taps = self.tensor(op.conv).float().flatten(1)
        heads = ((op.all_heads or op.heads) - op.heads) * op.head_dim  # others' numbers of x
        groups = ((op.all_groups or op.groups) - op.groups) * op.size
        begin = heads + op.first_group * op.size
        shifts = op.first_head * op.head_dim, begin, begin + groups
        struct = s.StateSpaceStruct(
            ctypes.addressof(self.states),
            self.place(taps.T),
            self.floats(op.conv_bias),
            self.place(-self.tensor(op.a_log).float().exp()),
            *(self.floats(op.skip), self.floats(op.dt_bias), self.floats(op.norm or None)),
            state_place(self._layout, "conv", op.layer)[0],
            state_place(self._layout, "ssm", op.layer)[0] + 4 * op.first_head * op.head_dim * op.size,
            *(taps.shape[1], op.heads, op.head_dim, op.groups, op.size),
            op.eps,
            self._to.width_of(op.out),
            s.ChannelPlaces((op.heads * op.head_dim, op.groups * op.size), shifts),
        )
        self._writes(struct, taps, 4 * op.heads * op.head_dim * op.size)
        return self._op(s.STATE_SPACE, struct, op.mixed, None, op.out)

    def _layer_norm(self, op: p.LayerNorm) -> Op:
        norm, bias = self.floats(op.weight), self.floats(op.bias)
        at = self.at(op.x), self.at(op.delta), self.at(op.out)
        return Op(s.LAYER_NORM, *at, norm=norm, bias=bias, eps=op.eps)

    def _center(self, op: p.Center) -> Op:
        return Op(kind=s.CENTER, input=self.at(op.x), output=self.at(op.out))

    def _scale_rows(self, op: p.ScaleRows) -> Op:
        return Op(s.SCALE_ROWS, self.at(op.x), self.at(op.factor), self.at(op.out))

    def _activate(self, op: p.Activate) -> Op:
        assert not op.gated, "gated ones have ops of their own"
        kind = s.ACTIVATIONS[op.activation]
        return Op(kind=s.ACTIVATE, input=self.at(op.x), output=self.at(op.out), layer=kind)

    def _halve_heads(self, op: p.HalveHeads) -> Op:
        return Op(kind=s.HALVE_HEADS, input=self.at(op.x), output=self.at(op.out), window=op.width)

    def _temper_queries(self, op: p.TemperQueries) -> Op:
        return self._op(s.TEMPER_QUERIES, s.TemperingStruct(op.scale, op.floor, op.shift), op.x, None, op.out)

    def _rotate_heads(self, op: p.RotateHeads) -> Op:
        rope = self._to.rope
        at = self.at(op.x), rope.offsets[0], self.at(op.out)
        return Op(s.ROTATE_HEADS, *at, window=rope.rotated[0])

    def _route_two(self, op: p.RouteTwo) -> Op:
        return Op(s.ROUTE_TWO, self.at(op.logits), self.at(op.factor), self.at(op.out), eps=op.jitter)

    def _divide(self, op: p.Divide) -> Op:
        return Op(kind=s.DIVIDE, input=self.at(op.x), table=self._to.keep_struct(self.registers(op.outs)))

    def _convolve(self, op: p.Convolve) -> Op:
        taps = self.tensor(op.conv).float().flatten(1)
        channels, channel = len(taps), 4 * (taps.shape[1] - 1)
        past = state_place(self._layout, "conv", op.layer)[0] + op.first_channel * channel
        struct = s.ConvolutionStruct(
            ctypes.addressof(self.states),
            *(self.place(taps.T), self.floats(op.conv_bias)),
            *(past, taps.shape[1], channels),
        )
        self.written.append((past, channels * channel))
        return self._whole(s.CONVOLVE, struct, op.x, op.out)

    def _selective_scan(self, op: p.SelectiveScan) -> Op:
        fade = -self.tensor(op.a_log).float().exp()
        channels, size = fade.shape
        state = state_place(self._layout, "ssm", op.layer)[0] + 4 * op.first_channel * size
        scan = s.SelectiveScanStruct(
            ctypes.addressof(self.states), self.place(fade), self.floats(op.skip), state, channels, size
        )
        registers = (self.at(name) for name in (op.dt, op.b, op.c, op.gated))
        gate_first = self._to.width_of(op.gated) - channels
        struct = s.ScanOpStruct(scan, *registers, op.first_channel, gate_first)
        self.written.append((state, 4 * channels * size))
        return self._whole(s.SELECTIVE_SCAN, struct, op.x, op.out)

    def _stream(self, op: p.Op) -> Op:
        return stream_op(op, self)

    def keep_struct(self, struct: ctypes.Structure) -> int:
        """Keeps ``struct`` alive and returns its address."""
        return self._to.keep_struct(struct)

    def registers(self, names: tuple[str, ...]) -> s.RegistersStruct:
        """Returns the struct of a list of registers."""
        numbers = torch.tensor([self.at(name) for name in names], dtype=torch.int32)
        return s.RegistersStruct(self.place(numbers), len(numbers))

    def _writes(self, op: s.GatedDeltaStruct | s.StateSpaceStruct, taps: Tensor, size: int) -> None:
        """Notes which bytes of a state ``op`` writes: those of its channels' past, and ``size`` of its heads."""
        channels, channel = taps.shape[0], 4 * (taps.shape[1] - 1)
        ends = (op.places.counts[0], sum(op.places.counts), channels)
        for first, end, shift in zip((0, *ends), ends, op.places.shifts, strict=False):
            self.written.append((op.past + (first + shift) * channel, (end - first) * channel))
        self.written.append((op.state, size))

    def _op(self, kind: int, struct: ctypes.Structure, x: str, beside: str | None, out: str) -> Op:
        table = self._to.keep_struct(struct)
        return Op(kind=kind, input=self.at(x), delta=self.at(beside), output=self.at(out), table=table)

    def _whole(self, kind: int, struct: ctypes.Structure, x: str, out: str) -> Op:
        """Returns an op that writes all columns of ``out``; a rank's ``delta`` is the first of its own."""
        table = self._to.keep_struct(struct)
        return Op(kind=kind, input=self.at(x), delta=0, output=self.at(out), table=table)


_COMPILERS: dict[type, Callable[[SpanCompiler, Any], Op]] = {
    p.RmsNorm: SpanCompiler._norm_rows,
    p.LatentAttention: SpanCompiler._latent,
    p.Route: SpanCompiler._route,
    p.Combine: SpanCompiler._combine,
    p.GatedHeads: SpanCompiler._gated_heads,
    p.Gate: SpanCompiler._gate,
    p.GatedDelta: SpanCompiler._gated_delta,
    p.StateSpace: SpanCompiler._state_space,
    p.LayerNorm: SpanCompiler._layer_norm,
    p.Center: SpanCompiler._center,
    p.ScaleRows: SpanCompiler._scale_rows,
    p.Activate: SpanCompiler._activate,
    p.HalveHeads: SpanCompiler._halve_heads,
    p.TemperQueries: SpanCompiler._temper_queries,
    p.RotateHeads: SpanCompiler._rotate_heads,
    p.RouteTwo: SpanCompiler._route_two,
    p.Divide: SpanCompiler._divide,
    p.Convolve: SpanCompiler._convolve,
    p.SelectiveScan: SpanCompiler._selective_scan,
    **dict.fromkeys(STREAM_OPS, SpanCompiler._stream),
}
