"""Builds the decoder that Llama and its relatives share, as a program; a model file says where it differs.

Knows nothing of tensors or files' formats. ``Decoder.windows`` is the list of each layer's attention window. Layers
with the same window form one group; a layer's slot in the page counts through the groups.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import msgspec

from baton.engine.program.config import ModelConfig
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.ops import (
    Add,
    Embedding,
    GeGlu,
    HalveHeads,
    Linear,
    LmHead,
    NormPart,
    Op,
    PagedAttention,
    RmsNorm,
    RopeAppend,
    SwiGlu,
    TemperQueries,
)
from baton.engine.program.program import NO_ROPE, Program, Rope, Weight
from baton.engine.program.rope import longest_context
from baton.engine.program.shared_kv import owners_slots
from baton.protos.nouns import LayerGroup

SILU, GELU_TANH = "silu", "gelu_pytorch_tanh"  # activations of an MLP's gate, as config.json spells them


NORMS = ("input_norm", "o_norm", "mlp_norm", "down_norm")  # a layer's weights, in the order of ``Norms``


class Norms(enum.Enum):
    """Says which norms a layer has and the checkpoint's names for them, in the order before and after attention,
    before and after the MLP.
    """

    BEFORE = ("input_layernorm", "", "post_attention_layernorm", "")
    AROUND = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    AFTER = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
    # as AROUND, by GLM-4's names
    GLM = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    ONE = ("input_layernorm", "", "", "")


class Tempering(msgspec.Struct, frozen=True):
    """Describes how queries are scaled by position (``ops.TemperQueries``)."""

    scale: float
    floor: float  # tokens
    shift: int  # added to positions
    unrotated: bool  # in layers without rope only, otherwise in all


class Decoder(msgspec.Struct, frozen=True):
    """Holds a decoder's sizes and the properties in which architectures differ.

    ``windows`` has each layer's attention window in tokens, 0 for none; ``ropes`` each layer's index in
    ``Program.ropes``, empty for 0 in all. ``fused``: the checkpoint has q, k and v in one matrix, gate and up in
    another; ``fused_mlp``: gate and up only. ``renamed`` are (part, replacement) pairs that turn Llama's tensor
    names into the checkpoint's.
    """

    vocab: int
    hidden: int
    inner: int  # width of the MLP
    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # of RMS norms
    windows: tuple[int, ...]
    tied: bool  # the head's weight is the embedding table
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # q and k are normed head by head
    wide_qk_norm: bool = False  # q and k are each normed as one vector over all heads
    fused: bool = False
    partial_rotary: bool = False  # the architecture has ``partial_rotary_factor``
    sinks: bool = False  # each head has a learned attention sink
    norms: Norms = Norms.BEFORE
    norm_plus: float = 0.0  # added to norms' weights
    activation: str = SILU  # of MLPs, as config.json spells it
    embed_scale: float = 1.0  # factor on embeddings
    query_scalar: float = 0.0  # scores are scaled by its power -1/2; 0: the head size's
    softcap: float = 0.0  # of attention scores; 0: none
    final_softcap: float = 0.0  # of logits; 0: none
    logit_scale: float = 1.0  # factor on logits
    ropes: tuple[int, ...] = ()
    local_ropes: tuple[Rope, ...] = ()  # ``Program.ropes`` from index 1 on
    experts: ExpertLayers | None = None  # layers with experts in place of an MLP
    fused_mlp: bool = False
    paired: int = 0  # leading numbers of a head rotated with their neighbours instead of halves
    tempering: Tempering | None = None  # queries are scaled by position
    renamed: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(
        cls,
        config: ModelConfig,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        tied: bool = False,
        activation: tuple[str, str] = ("hidden_act", SILU),
        **differences: bool,
    ) -> Decoder:
        """Reads the common fields of ``config``, given the architecture's defaults; all layers start with full
        attention.

        ``activation`` is the field that names the MLP's activation, and the supported value; ``differences`` are
        flags of ``Decoder``. Raises CheckpointError.
        """
        config.must_be(*activation)
        config.must_be("is_causal", True)
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
            # An architecture whose layers all have experts may leave out the width of those without.
            inner=config.size("intermediate_size", config.fields.get("moe_intermediate_size")),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
            eps=config.number("rms_norm_eps", 1e-6),
            windows=(0,) * config.size("num_hidden_layers"),
            tied=config.flag("tie_word_embeddings", tied),
            activation=activation[1],
            **differences,  # type: ignore[arg-type]
        )

    def program(self, config: ModelConfig, max_position: int, rope: Rope | None = None) -> Program:
        """Returns the program of this decoder; ``max_position`` is the context length if config.json has none.

        ``rope`` replaces the one in ``config``, for architectures with their own spelling. Raises CheckpointError.
        """
        rope = rope or config.rope()
        if not self.partial_rotary and any(_rotates_a_part(each) for each in (rope, *self.local_ropes)):
            raise config.error("partial_rotary_factor", "must be 1 in this architecture")
        slots = self._slots()
        layers = [op for layer in range(len(self.windows)) for op in self._layer(layer, slots[layer])]
        return Program(
            ops=(*self._begin(), *layers, *self._end()),
            weights=tuple(map(self._renamed, self._weights())),
            groups=tuple(self._groups()),
            rope=rope,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            max_position=longest_context(rope, config.size("max_position_embeddings", max_position)),
            local_ropes=self.local_ropes,
            query_scalar=self.query_scalar,
            idle=self._idle(),
        )

    def _idle(self) -> tuple[str, ...]:
        """Returns the modules that a checkpoint or an adapter may have, and that have no effect."""
        return ()

    def _slots(self) -> Sequence[int]:
        """Returns the slot in a page of the K and V that each layer reads."""
        return owners_slots(self.windows, range(len(self.windows)))

    def _begin(self) -> tuple[Op, ...]:
        return (Embedding("embed", "x", self.embed_scale),)

    def _end(self) -> tuple[Op, ...]:
        head = "embed" if self.tied else "head"
        return (LmHead("x", self._behind("down"), "norm", self.eps, head, self.final_softcap, self.logit_scale),)

    def _layer(self, layer: int, slot: int) -> tuple[Op, ...]:
        return (
            *self._before(layer, "input_norm", self._behind("down") if layer else None),
            *self._attention(layer, slot),
            *self._after(layer, "o_norm", "o"),
            *self._before(layer, "mlp_norm", self._behind("o")),
            *self._mlp(layer),
            *self._after(layer, "down_norm", "down"),
        )

    def _attention(self, layer: int, slot: int) -> tuple[Op, ...]:
        def name(part: str, present: bool) -> str | None:
            return f"{layer}.{part}" if present else None

        rope = self.ropes[layer] if self.ropes else 0
        q_norm, k_norm = (name(part, self._norms_heads(layer)) for part in ("q_norm", "k_norm"))
        sinks = name("sinks", self.sinks)
        return (
            Linear(self._source, f"{layer}.qkv", name("qkv_bias", self.qkv_bias), "qkv"),
            *self._before_rope(layer),
            RopeAppend("qkv", slot, q_norm, k_norm, self.eps, "q", rope),
            PagedAttention("q", slot, self.windows[layer], "a", self.softcap, sinks),
            Linear("a", f"{layer}.o", name("o_bias", self.o_bias), "o"),
        )

    def _norms_heads(self, layer: int) -> bool:
        """Returns whether q and k of ``layer`` are normed head by head."""
        return self.qk_norm

    def _before_rope(self, layer: int) -> Iterator[Op]:
        """Yields the ops on q and k before they are rotated."""
        q, kv, tempering = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.tempering
        if self.wide_qk_norm:
            yield NormPart("qkv", 0, q, f"{layer}.q_norm", self.eps)
            yield NormPart("qkv", q, kv, f"{layer}.k_norm", self.eps)
        if tempering is not None and not (tempering.unrotated and self.has_rope(layer)):
            yield TemperQueries("qkv", tempering.scale, tempering.floor, tempering.shift, "qkv")
        if self.paired and self.has_rope(layer):
            yield HalveHeads("qkv", self.paired, "qkv")

    def has_rope(self, layer: int) -> bool:
        """Returns whether ``layer`` has a rotary embedding."""
        return not self.ropes or self.ropes[layer] == 0 or self.local_ropes[self.ropes[layer] - 1].kind != NO_ROPE

    @property
    def _source(self) -> str:
        """The register that attention and MLPs read."""
        return "x" if self.norms is Norms.AFTER else "h"

    def _behind(self, out: str) -> str:
        """Returns the register with the output of attention or an MLP that is added to the residual."""
        return out if self.norms is Norms.BEFORE else f"{out}_normed"

    def _before(self, layer: int, norm: str, delta: str | None) -> tuple[Op, ...]:
        if self.norms is not Norms.AFTER:
            return (RmsNorm("x", delta, f"{layer}.{norm}", self.eps, "h"),)
        return () if delta is None else (Add("x", delta),)

    def _after(self, layer: int, norm: str, out: str) -> tuple[Op, ...]:
        if self.norms is Norms.BEFORE:
            return ()
        return (RmsNorm(out, None, f"{layer}.{norm}", self.eps, self._behind(out)),)

    def _mlp(self, layer: int) -> tuple[Op, ...]:
        if self.experts is not None and self.experts.layers[layer]:
            return self.experts.ops(layer)
        gate_up, down = (f"{layer}.{part}_bias" if self.mlp_bias else None for part in ("gate_up", "down"))
        return (
            Linear(self._source, f"{layer}.gate_up", gate_up, "gate_up"),
            GeGlu("gate_up", "g") if self.activation == GELU_TANH else SwiGlu("gate_up", "g"),
            Linear("g", f"{layer}.down", down, "down"),
        )

    def _weights(self) -> Iterator[Weight]:
        yield Weight("embed", ("model.embed_tokens.weight",), ((self.vocab, self.hidden),))
        yield msgspec.structs.replace(self._norm("norm", "model.norm", self.hidden), times=self.logit_scale)
        if not self.tied:
            yield Weight("head", ("lm_head.weight",), ((self.vocab, self.hidden),))
        for layer in range(len(self.windows)):
            for name, source in zip(NORMS, self.norms.value, strict=True):
                if source:
                    yield self._norm(f"{layer}.{name}", f"model.layers.{layer}.{source}", self.hidden)
            yield from self._attention_weights(layer)
            yield from self._mlp_weights(layer)

    def _renamed(self, weight: Weight) -> Weight:
        sources = weight.sources
        for part, name in self.renamed:
            sources = tuple(source.replace(part, name) for source in sources)
        return msgspec.structs.replace(weight, sources=sources)

    def _norm(self, name: str, source: str, width: int) -> Weight:
        return Weight(name, (f"{source}.weight",), ((width,),), self.norm_plus)

    def _attention_weights(self, layer: int) -> Iterator[Weight]:
        attention = f"model.layers.{layer}.self_attn"
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        apart = ("q_proj", "k_proj", "v_proj"), (q, kv, kv)
        parts, rows = (("qkv_proj",), (q + 2 * kv,)) if self.fused else apart
        yield from dense(layer, "qkv", attention, parts, rows, self.hidden, self.qkv_bias)
        yield from dense(layer, "o", attention, ("o_proj",), (self.hidden,), q, self.o_bias)
        if self._norms_heads(layer) or self.wide_qk_norm:
            yield self._norm(f"{layer}.q_norm", f"{attention}.q_norm", q if self.wide_qk_norm else self.head_dim)
            yield self._norm(f"{layer}.k_norm", f"{attention}.k_norm", kv if self.wide_qk_norm else self.head_dim)
        if self.sinks:
            yield Weight(f"{layer}.sinks", (f"{attention}.sinks",), ((self.heads,),))

    def _mlp_weights(self, layer: int) -> Iterator[Weight]:
        mlp = f"model.layers.{layer}.mlp"
        if self.experts is not None and self.experts.layers[layer]:
            yield from self.experts.weights(layer, self.hidden)
            return
        apart = ("gate_proj", "up_proj"), (self.inner,) * 2
        parts, rows = (("gate_up_proj",), (2 * self.inner,)) if self.fused or self.fused_mlp else apart
        yield from dense(layer, "gate_up", mlp, parts, rows, self.hidden, self.mlp_bias)
        yield from dense(layer, "down", mlp, ("down_proj",), (self.hidden,), self.inner, self.mlp_bias)

    def _groups(self) -> Iterator[LayerGroup]:
        for window in sorted(set(self.windows)):
            kind = "window" if window else "full"
            count = self.windows.count(window)
            yield LayerGroup(kind, ("k", "v"), count, self.kv_heads, self.head_dim, window)


def with_rope_in(decoder: Decoder, rotary: Sequence[bool]) -> Decoder:
    """Returns ``decoder`` with a rotary embedding only in the layers for which ``rotary`` is true."""
    if all(rotary):
        return decoder
    ropes = tuple(int(not each) for each in rotary)
    return msgspec.structs.replace(decoder, ropes=ropes, local_ropes=(Rope(NO_ROPE, 1.0, {}),))


def _rotates_a_part(rope: Rope) -> bool:
    return rope.parameters.get("partial_rotary_factor", 1.0) != 1.0


def _kv_heads(config: ModelConfig, absent: int, null: int) -> int:
    return null if "num_key_value_heads" in config.fields else absent


def dense(
    layer: int, name: str, at: str, parts: tuple[str, ...], rows: tuple[int, ...], width: int, bias: bool
) -> Iterator[Weight]:
    """Yields the weight ``{layer}.{name}`` of a layer's matrix, and its bias if ``bias``.

    The matrix stacks the tensors ``{at}.{part}`` of ``parts``, which have ``rows`` rows each and ``width`` columns.
    """
    yield Weight(f"{layer}.{name}", tuple(f"{at}.{p}.weight" for p in parts), tuple((r, width) for r in rows))
    if bias:
        yield Weight(f"{layer}.{name}_bias", tuple(f"{at}.{p}.bias" for p in parts), tuple((r,) for r in rows))
