"""Builds decoders that mix attention with layers that keep a recurrent state; a model file says which and how.

Knows nothing of tensors or of files' formats. Each layer with attention has a slot in the page, each other one a
slot in the state; both are counted through their own kind alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import msgspec

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder, dense
from baton.engine.program.ops import (
    Gate,
    GatedDelta,
    GatedHeads,
    Linear,
    Op,
    PagedAttention,
    RopeAppend,
    StateSpace,
)
from baton.engine.program.program import Program, Rope, Weight
from baton.protos.nouns import LayerGroup, StatePlane


class Recurrent(Protocol):
    """Describes layers with recurrent state, whose ops read register ``h`` and write ``o``."""

    def ops(self, layer: int, place: int) -> tuple[Op, ...]:
        """Returns the ops of ``layer``, the ``place``-th of its kind."""

    def weights(self, layer: int, hidden: int) -> Iterator[Weight]:
        """Yields the weights of ``layer`` of a model of width ``hidden``."""

    def planes(self, layers: int) -> tuple[StatePlane, ...]:
        """Returns the arrays of state that a sequence keeps for ``layers`` such layers."""


class GatedDeltaLayers(msgspec.Struct, frozen=True):
    """Describes layers of gated delta nets."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution spans
    eps: float
    grouped: bool  # q, k, v, z lie key head by key head in one matrix, b and a in another
    at: str = "linear_attn"  # the checkpoint's name of the module in a layer

    @classmethod
    def read(cls, config: ModelConfig, eps: float, grouped: bool) -> GatedDeltaLayers:
        """Reads the sizes from ``config``. Raises CheckpointError."""
        key_heads, value_heads = config.size("linear_num_key_heads", 16), config.size("linear_num_value_heads", 32)
        if value_heads % key_heads:
            raise config.error("linear_num_value_heads", f"is {value_heads}; {key_heads} key heads must divide it")
        dims = config.size("linear_key_head_dim", 128), config.size("linear_value_head_dim", 128)
        return cls(key_heads, value_heads, *dims, _kernel(config, "linear_conv_kernel_dim"), eps, grouped)

    @property
    def channels(self) -> int:
        """Returns the number of convolved channels: those of q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def ops(self, layer: int, place: int) -> tuple[Op, ...]:
        """Returns the ops of ``layer``, the ``place``-th of its kind."""
        names = f"{layer}.conv", f"{layer}.a_log", f"{layer}.dt_bias", f"{layer}.delta_norm"
        sizes = self.key_heads, self.value_heads, self.key_dim, self.value_dim
        return (
            Linear("h", f"{layer}.qkvz", None, "qkvz"),
            Linear("h", f"{layer}.ba", None, "ba"),
            GatedDelta("qkvz", "ba", place, *names, *sizes, self.grouped, self.eps, "read"),
            Linear("read", f"{layer}.out", None, "o"),
        )

    def weights(self, layer: int, hidden: int) -> Iterator[Weight]:
        """Yields the weights of ``layer`` of a model of width ``hidden``."""
        at, values = f"model.layers.{layer}.{self.at}", self.value_heads * self.value_dim
        wide, gates = self.channels + values, 2 * self.value_heads
        if self.grouped:
            yield Weight(f"{layer}.qkvz", (f"{at}.in_proj_qkvz.weight",), ((wide, hidden),))
            yield Weight(f"{layer}.ba", (f"{at}.in_proj_ba.weight",), ((gates, hidden),))
        else:
            pair = f"{at}.in_proj_qkv.weight", f"{at}.in_proj_z.weight"
            yield Weight(f"{layer}.qkvz", pair, ((self.channels, hidden), (values, hidden)))
            both = f"{at}.in_proj_b.weight", f"{at}.in_proj_a.weight"
            yield Weight(f"{layer}.ba", both, ((self.value_heads, hidden),) * 2)
        yield Weight(f"{layer}.conv", (f"{at}.conv1d.weight",), ((self.channels, 1, self.kernel),))
        yield Weight(f"{layer}.a_log", (f"{at}.A_log",), ((self.value_heads,),))
        yield Weight(f"{layer}.dt_bias", (f"{at}.dt_bias",), ((self.value_heads,),))
        yield Weight(f"{layer}.delta_norm", (f"{at}.norm.weight",), ((self.value_dim,),))
        yield Weight(f"{layer}.out", (f"{at}.out_proj.weight",), ((hidden, values),))

    def planes(self, layers: int) -> tuple[StatePlane, ...]:
        """Returns the arrays of state for ``layers`` layers: the convolution's last inputs, and the delta rule's
        matrices.
        """
        return (
            StatePlane("conv", layers, (self.channels, self.kernel - 1)),
            StatePlane("delta", layers, (self.value_heads, self.key_dim, self.value_dim)),
        )


class StateSpaceLayers(msgspec.Struct, frozen=True):
    """Describes Mamba-2 layers of ``heads`` heads, with B and C in ``groups`` groups of ``size`` numbers."""

    heads: int
    head_dim: int
    groups: int
    size: int
    kernel: int  # tokens that the convolution spans
    eps: float
    conv_bias: bool  # the convolution has a bias
    bias: bool  # the projections have biases
    at: str = "mamba"  # the checkpoint's name of the module in a layer

    @classmethod
    def read(cls, config: ModelConfig, hidden: int, eps: float) -> StateSpaceLayers:
        """Reads the sizes from ``config``; ``hidden`` is the model's width. Raises CheckpointError."""
        heads, groups = config.size("mamba_n_heads", 128), config.size("mamba_n_groups", 1)
        inner = config.size("mamba_expand", 2) * hidden
        if inner % heads or config.fields.get("mamba_d_head", "auto") not in ("auto", inner // heads):
            raise config.error("mamba_n_heads", f"is {heads}; heads of one size must make up {inner} numbers")
        if heads % groups:
            raise config.error("mamba_n_groups", f"is {groups}; it must divide {heads} heads")
        require_unlimited_steps(config)
        kernel = _kernel(config, "mamba_d_conv")
        biases = config.flag("mamba_conv_bias", True), config.flag("mamba_proj_bias", False)
        return cls(heads, inner // heads, groups, config.size("mamba_d_state", 256), kernel, eps, *biases)

    @property
    def channels(self) -> int:
        """Returns the number of convolved channels: those of x, B and C."""
        return self.heads * self.head_dim + 2 * self.groups * self.size

    def ops(self, layer: int, place: int) -> tuple[Op, ...]:
        """Returns the ops of ``layer``, the ``place``-th of its kind."""
        conv_bias = f"{layer}.conv_bias" if self.conv_bias else None
        names = f"{layer}.a_log", f"{layer}.skip", f"{layer}.dt_bias", f"{layer}.ssm_norm"
        sizes = self.heads, self.head_dim, self.groups, self.size
        biases = (f"{layer}.{part}_bias" if self.bias else None for part in ("in", "out"))
        return (
            Linear("h", f"{layer}.in", next(biases), "mixed_in"),
            StateSpace("mixed_in", place, f"{layer}.conv", conv_bias, *names, *sizes, self.eps, "read"),
            Linear("read", f"{layer}.out", next(biases), "o"),
        )

    def weights(self, layer: int, hidden: int) -> Iterator[Weight]:
        """Yields the weights of ``layer`` of a model of width ``hidden``."""
        at, inner = f"model.layers.{layer}.{self.at}", self.heads * self.head_dim
        rows = inner + self.channels + self.heads
        yield from dense(layer, "in", at, ("in_proj",), (rows,), hidden, self.bias)
        yield from dense(layer, "out", at, ("out_proj",), (hidden,), inner, self.bias)
        yield Weight(f"{layer}.conv", (f"{at}.conv1d.weight",), ((self.channels, 1, self.kernel),))
        if self.conv_bias:
            yield Weight(f"{layer}.conv_bias", (f"{at}.conv1d.bias",), ((self.channels,),))
        for name, source in (("a_log", "A_log"), ("skip", "D"), ("dt_bias", "dt_bias")):
            yield Weight(f"{layer}.{name}", (f"{at}.{source}",), ((self.heads,),))
        yield Weight(f"{layer}.ssm_norm", (f"{at}.norm.weight",), ((inner,),))

    def planes(self, layers: int) -> tuple[StatePlane, ...]:
        """Returns the arrays of state for ``layers`` layers: the convolution's last inputs, and the recurrence's
        states.
        """
        return (
            StatePlane("conv", layers, (self.channels, self.kernel - 1)),
            StatePlane("ssm", layers, (self.heads, self.head_dim, self.size)),
        )


def _kernel(config: ModelConfig, field: str) -> int:
    """Returns the number of tokens that a convolution spans, from ``field``. Raises CheckpointError below 2."""
    found = config.size(field, 4)
    if found < 2:
        raise config.error(field, f"is {found}; it must be 2 or more")
    return found


def require_unlimited_steps(config: ModelConfig) -> None:
    """Checks that ``time_step_limit`` is 0 to infinity, because transformers applies other limits in chunks alone.
    Raises CheckpointError.
    """
    found = config.fields.get("time_step_limit") or [0.0, None]
    unlimited = isinstance(found, list) and len(found) == 2 and found[0] == 0
    if not unlimited or found[1] not in (math.inf, {"__float__": "Infinity"}, None):
        raise config.error("time_step_limit", f"is {found!r}; it must be 0 to infinity")


class HybridDecoder(Decoder, frozen=True):
    """Holds a decoder in which layer i is ``recurrent`` if ``keeps[i]``, and has attention otherwise."""

    recurrent: Recurrent | None = None
    keeps: tuple[bool, ...] = ()
    gated: bool = False  # attention's output is multiplied by a gate, which q_proj computes beside q

    @classmethod
    def of(cls, plain: Decoder, **own: object) -> HybridDecoder:
        """Returns ``plain`` as a hybrid; ``own`` are the hybrid's additional fields, or replacements of others."""
        fields = {name: getattr(plain, name) for name in Decoder.__struct_fields__}
        return cls(**(fields | own))  # type: ignore[arg-type]

    def program(self, config: ModelConfig, max_position: int, rope: Rope | None = None) -> Program:
        """Returns the program of this decoder, with its recurrent state. Raises CheckpointError."""
        planes = self._recurrent.planes(sum(self.keeps))
        return msgspec.structs.replace(super().program(config, max_position, rope), states=planes)

    @property
    def _recurrent(self) -> Recurrent:
        assert self.recurrent is not None, "a hybrid is made with its recurrent layers"
        return self.recurrent

    def _attention(self, layer: int, slot: int) -> tuple[Op, ...]:
        place = self.keeps[:layer].count(self.keeps[layer])  # among the layers of its kind
        if self.keeps[layer]:
            return self._recurrent.ops(layer, place)
        if not self.gated:
            return super()._attention(layer, place)
        bias, o_bias = f"{layer}.q_gate_kv_bias", f"{layer}.o_bias"
        return (
            Linear("h", f"{layer}.q_gate_kv", bias if self.qkv_bias else None, "q_gate_kv"),
            GatedHeads("q_gate_kv", "qkv", "gate"),
            RopeAppend("qkv", place, f"{layer}.q_norm", f"{layer}.k_norm", self.eps, "q"),
            PagedAttention("q", place, 0, "a"),
            Gate("a", "gate", "gated"),
            Linear("gated", f"{layer}.o", o_bias if self.o_bias else None, "o"),
        )

    def _attention_weights(self, layer: int) -> Iterator[Weight]:
        if self.keeps[layer]:
            yield from self._recurrent.weights(layer, self.hidden)
            return
        if not self.gated:
            yield from super()._attention_weights(layer)
            return
        at, q, kv = f"model.layers.{layer}.self_attn", self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts, rows = ("q_proj", "k_proj", "v_proj"), (2 * q, kv, kv)
        yield from dense(layer, "q_gate_kv", at, parts, rows, self.hidden, self.qkv_bias)
        yield from dense(layer, "o", at, ("o_proj",), (self.hidden,), q, self.o_bias)
        for norm in ("q_norm", "k_norm"):
            yield self._norm(f"{layer}.{norm}", f"{at}.{norm}", self.head_dim)

    def _groups(self) -> Iterator[LayerGroup]:
        count = len(self.keeps) - sum(self.keeps)
        yield LayerGroup("full", ("k", "v"), count, self.kv_heads, self.head_dim)
