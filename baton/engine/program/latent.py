"""Builds decoders with multi-head latent attention (https://arxiv.org/abs/2405.04434), which store one latent per
token instead of K and V.

Knows nothing of tensors or of files' formats. The differences between DeepSeek-V2 and V3 are in their model files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.ops import LatentAttention, Linear, Op, RmsNorm
from baton.engine.program.program import Program, Rope, Weight
from baton.protos.nouns import LayerGroup

NORM_EPS = 1e-6  # of the norms of compressed queries and latents, whatever the config's own is


class Latent(msgspec.Struct, frozen=True):
    """Holds the sizes of latent attention."""

    nope_dim: int  # numbers of a head's key without rotary positions (qk_nope_head_dim)
    rope_dim: int  # numbers of a head's key with rotary positions (qk_rope_head_dim)
    value_dim: int  # numbers of a head's value (v_head_dim)
    rank: int  # numbers of a latent
    q_rank: int  # numbers of a compressed query; 0: queries aren't compressed
    paired: bool  # rotation pairs neighbours instead of halves
    scale: float  # factor on attention scores

    @classmethod
    def read(cls, config: ModelConfig, paired: bool) -> Latent:
        """Reads the sizes from ``config``. Raises CheckpointError."""
        nope_dim, rope_dim = config.size("qk_nope_head_dim", 128), config.size("qk_rope_head_dim", 64)
        if rope_dim % 2:
            raise config.error("qk_rope_head_dim", f"is {rope_dim}; it must be even")
        q_rank = 0 if config.fields.get("q_lora_rank", 1536) is None else config.size("q_lora_rank", 1536)
        rank, value_dim = config.size("kv_lora_rank", 512), config.size("v_head_dim", 128)
        return cls(nope_dim, rope_dim, value_dim, rank, q_rank, paired, _scale(config.rope(), nope_dim + rope_dim))


class LatentDecoder(Decoder, frozen=True):
    """Holds a decoder with latent attention; ``kv_heads`` is 1, and ``head_dim`` is the width of what is stored per
    token.
    """

    latent: Latent | None = None

    @classmethod
    def of(cls, config: ModelConfig, latent: Latent, experts: ExpertLayers) -> LatentDecoder:
        """Returns the decoder of ``config`` with the given attention and expert layers. Raises CheckpointError."""
        bias = config.flag("attention_bias", False)
        plain = Decoder.read(config, head_dim=latent.rope_dim, kv_heads=config.size("num_attention_heads"))
        fields = {name: getattr(plain, name) for name in Decoder.__struct_fields__}
        own = {"kv_heads": 1, "head_dim": latent.rank + latent.rope_dim, "qkv_bias": bias, "o_bias": bias}
        return cls(**(fields | own | {"experts": experts, "latent": latent}))

    def program(self, config: ModelConfig, max_position: int, rope: Rope | None = None) -> Program:
        """Returns the program of this decoder. Raises CheckpointError."""
        return replace(super().program(config, max_position, rope), rope_dim=self._latent.rope_dim)

    @property
    def _latent(self) -> Latent:
        assert self.latent is not None, "a latent decoder is made with its sizes"
        return self.latent

    def _layer(self, layer: int, slot: int) -> tuple[Op, ...]:
        o_bias = f"{layer}.o_bias" if self.o_bias else None
        return (
            RmsNorm("x", "down" if layer else None, f"{layer}.input_norm", self.eps, "h"),
            *self._queries(layer),
            Linear("h", f"{layer}.kv_a", f"{layer}.kv_a_bias" if self.qkv_bias else None, "latent"),
            self._attend(layer, slot),
            Linear("a", f"{layer}.o", o_bias, "o"),
            RmsNorm("x", "o", f"{layer}.mlp_norm", self.eps, "h"),
            *self._mlp(layer),
        )

    def _queries(self, layer: int) -> tuple[Op, ...]:
        if not self._latent.q_rank:
            return (Linear("h", f"{layer}.q", None, "q"),)
        return (
            Linear("h", f"{layer}.q_a", f"{layer}.q_a_bias" if self.qkv_bias else None, "q_low"),
            RmsNorm("q_low", None, f"{layer}.q_a_norm", NORM_EPS, "q_low_normed"),
            Linear("q_low_normed", f"{layer}.q_b", None, "q"),
        )

    def _attend(self, layer: int, slot: int) -> Op:
        m = self._latent
        names = f"{layer}.kv_a_norm", f"{layer}.kv_b"
        sizes = m.nope_dim, m.rope_dim, m.value_dim, m.rank
        return LatentAttention("q", "latent", slot, *names, NORM_EPS, *sizes, m.paired, m.scale, "a")

    def _attention_weights(self, layer: int) -> Iterator[Weight]:
        m = self._latent
        attention, width = f"model.layers.{layer}.self_attn", m.nope_dim + m.rope_dim
        if m.q_rank:
            yield from _projection(f"{layer}.q_a", f"{attention}.q_a_proj", m.q_rank, self.hidden, self.qkv_bias)
            yield Weight(f"{layer}.q_a_norm", (f"{attention}.q_a_layernorm.weight",), ((m.q_rank,),))
            yield from _projection(f"{layer}.q_b", f"{attention}.q_b_proj", self.heads * width, m.q_rank, False)
        else:
            yield from _projection(f"{layer}.q", f"{attention}.q_proj", self.heads * width, self.hidden, False)
        kept, kv_a = m.rank + m.rope_dim, f"{attention}.kv_a_proj_with_mqa"
        yield from _projection(f"{layer}.kv_a", kv_a, kept, self.hidden, self.qkv_bias)
        yield Weight(f"{layer}.kv_a_norm", (f"{attention}.kv_a_layernorm.weight",), ((m.rank,),))
        expanded = self.heads * (m.nope_dim + m.value_dim)
        yield from _projection(f"{layer}.kv_b", f"{attention}.kv_b_proj", expanded, m.rank, False)
        values = self.heads * m.value_dim
        yield from _projection(f"{layer}.o", f"{attention}.o_proj", self.hidden, values, self.o_bias)

    def _groups(self) -> Iterator[LayerGroup]:
        yield LayerGroup("full", ("latent",), len(self.windows), self.kv_heads, self.head_dim)


def _projection(name: str, at: str, rows: int, width: int, bias: bool) -> Iterator[Weight]:
    yield Weight(name, (f"{at}.weight",), ((rows, width),))
    if bias:
        yield Weight(f"{name}_bias", (f"{at}.bias",), ((rows,),))


def _scale(rope: Rope, width: int) -> float:
    """Returns the factor on scores; yarn's own factor on angles is included squared, for query and key."""
    factor, weight = rope.parameters.get("factor", 1.0), rope.parameters.get("mscale_all_dim", 0.0)
    if rope.kind == "default" or not weight or factor <= 1:
        return width**-0.5
    mscale = 0.1 * weight * math.log(factor) + 1.0
    return float(width**-0.5 * mscale * mscale)
