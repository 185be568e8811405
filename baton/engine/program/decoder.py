"""Builds the decoder that Llama, Mistral and Qwen share, as a program; a model file says where it differs.

Knows nothing of tensors or files' formats. Layers with the same window form one group; a layer's place in the page
counts through the groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.engine.program.config import ModelConfig
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.ops import (
    Embedding,
    Linear,
    LmHead,
    Op,
    PagedAttention,
    Program,
    RmsNorm,
    RopeAppend,
    SwiGlu,
    Weight,
)
from baton.protos.nouns import LayerGroup


class Decoder(msgspec.Struct, frozen=True):
    """Holds a decoder's sizes and the places where architectures differ. ``windows`` has each layer's, 0 for
    none.
    """

    vocab: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    windows: tuple[int, ...]
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertLayers | None = None

    @classmethod
    def read(
        cls, config: ModelConfig, head_dim: int | None = None, kv_heads: int | None = None, **differences: bool
    ) -> Decoder:
        """Reads the common fields of ``config``, given the architecture's defaults; ``windows`` starts as none.

        Raises CheckpointError.
        """
        if config.fields.get("hidden_act", "silu") != "silu":
            raise config.error("hidden_act", "must be silu")
        hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
        kv_heads = config.size("num_key_value_heads", _kv_heads(config, kv_heads or heads, heads))
        if heads % kv_heads:
            raise config.error("num_key_value_heads", f"is {kv_heads}; it must divide {heads} heads")
        width = config.size("head_dim", head_dim or hidden // heads)
        if width % 2:
            raise config.error("head_dim", f"is {width}; it must be even")
        return cls(
            vocab=config.size("vocab_size"),
            hidden=hidden,
            inner=config.size("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
            eps=config.number("rms_norm_eps", 1e-6),
            windows=(0,) * config.size("num_hidden_layers"),
            tied=config.flag("tie_word_embeddings", False),
            **differences,  # type: ignore[arg-type]
        )

    def program(self, config: ModelConfig, max_position: int) -> Program:
        """Returns the ops and weights of this decoder; ``max_position`` counts where config.json leaves it
        out.
        """
        slots = _slots(self.windows)
        layers = [op for layer in range(len(self.windows)) for op in self._layer(layer, slots[layer])]
        last = LmHead("x", "down", "norm", self.eps, "embed" if self.tied else "head")
        return Program(
            ops=(Embedding("embed", "x"), *layers, last),
            weights=tuple(self._weights()),
            groups=tuple(self._groups()),
            rope=config.rope(),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            max_position=config.size("max_position_embeddings", max_position),
        )

    def _layer(self, layer: int, slot: int) -> tuple[Op, ...]:
        def name(part: str, present: bool) -> str | None:
            return f"{layer}.{part}" if present else None

        q_norm, k_norm = name("q_norm", self.qk_norm), name("k_norm", self.qk_norm)
        return (
            RmsNorm("x", "down" if layer else None, f"{layer}.input_norm", self.eps, "h"),
            Linear("h", f"{layer}.qkv", name("qkv_bias", self.qkv_bias), "qkv"),
            RopeAppend("qkv", slot, q_norm, k_norm, self.eps, "q"),
            PagedAttention("q", slot, self.windows[layer], "a"),
            Linear("a", f"{layer}.o", name("o_bias", self.o_bias), "o"),
            RmsNorm("x", "o", f"{layer}.mlp_norm", self.eps, "h"),
            *self._mlp(layer),
        )

    def _mlp(self, layer: int) -> tuple[Op, ...]:
        if self.experts is not None and self.experts.layers[layer]:
            return self.experts.ops(layer)
        gate_up, down = (f"{layer}.{part}_bias" if self.mlp_bias else None for part in ("gate_up", "down"))
        return (
            Linear("h", f"{layer}.gate_up", gate_up, "gate_up"),
            SwiGlu("gate_up", "g"),
            Linear("g", f"{layer}.down", down, "down"),
        )

    def _weights(self) -> Iterator[Weight]:
        yield Weight("embed", ("model.embed_tokens.weight",), ((self.vocab, self.hidden),))
        yield Weight("norm", ("model.norm.weight",), ((self.hidden,),))
        if not self.tied:
            yield Weight("head", ("lm_head.weight",), ((self.vocab, self.hidden),))
        for layer in range(len(self.windows)):
            yield from self._attention_weights(layer)
            yield from self._mlp_weights(layer)

    def _attention_weights(self, layer: int) -> Iterator[Weight]:
        at, attention = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield Weight(f"{layer}.input_norm", (f"{at}.input_layernorm.weight",), ((self.hidden,),))
        yield from _dense(
            layer, "qkv", attention, ("q_proj", "k_proj", "v_proj"), (q, kv, kv), self.hidden, self.qkv_bias
        )
        yield from _dense(layer, "o", attention, ("o_proj",), (self.hidden,), q, self.o_bias)
        if self.qk_norm:
            yield Weight(f"{layer}.q_norm", (f"{attention}.q_norm.weight",), ((self.head_dim,),))
            yield Weight(f"{layer}.k_norm", (f"{attention}.k_norm.weight",), ((self.head_dim,),))

    def _mlp_weights(self, layer: int) -> Iterator[Weight]:
        at, mlp = f"model.layers.{layer}", f"model.layers.{layer}.mlp"
        yield Weight(f"{layer}.mlp_norm", (f"{at}.post_attention_layernorm.weight",), ((self.hidden,),))
        if self.experts is not None and self.experts.layers[layer]:
            yield from self.experts.weights(layer, self.hidden)
            return
        yield from _dense(
            layer, "gate_up", mlp, ("gate_proj", "up_proj"), (self.inner,) * 2, self.hidden, self.mlp_bias
        )
        yield from _dense(layer, "down", mlp, ("down_proj",), (self.hidden,), self.inner, self.mlp_bias)

    def _groups(self) -> Iterator[LayerGroup]:
        for window in sorted(set(self.windows)):
            kind = "window" if window else "full"
            count = self.windows.count(window)
            yield LayerGroup(kind, ("k", "v"), count, self.kv_heads, self.head_dim, window)


def _kv_heads(config: ModelConfig, absent: int, null: int) -> int:
    return null if "num_key_value_heads" in config.fields else absent


def _slots(windows: tuple[int, ...]) -> list[int]:
    """Each layer's place in a page: groups by rising window, layers in order within."""
    order = sorted(range(len(windows)), key=lambda layer: (windows[layer], layer))
    return [order.index(layer) for layer in range(len(windows))]


def _dense(
    layer: int, name: str, at: str, parts: tuple[str, ...], rows: tuple[int, ...], width: int, bias: bool
) -> Iterator[Weight]:
    yield Weight(f"{layer}.{name}", tuple(f"{at}.{p}.weight" for p in parts), tuple((r, width) for r in rows))
    if bias:
        yield Weight(f"{layer}.{name}_bias", tuple(f"{at}.{p}.bias" for p in parts), tuple((r,) for r in rows))
