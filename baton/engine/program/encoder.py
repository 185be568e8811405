"""Builds programs of encoders, which read a whole text in both directions; a model file says where an architecture
differs.

Knows nothing of tensors or files' formats. Of each token a worker keeps its id alone: nothing can be computed of a
text before its last token is there.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import Activate, Classify, EmbedText, FullAttention, LayerNorm, Linear, Op
from baton.engine.program.program import Program, Rope, Weight
from baton.protos.nouns import LayerGroup

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")
TOKENS = LayerGroup("full", ("tokens",), 1, 1, 4)  # each token's number, in 4 bytes
CLASSIFIER = "ForSequenceClassification"  # how the names of architectures with a head end


class EncoderNames(msgspec.Struct, frozen=True):
    """Holds a checkpoint's names of its tensors; those of a layer follow ``layer`` and its number."""

    words: str  # embedding table of token ids
    places: str  # embedding table of positions
    types: str  # embedding table of token types
    embed_norm: str
    layer: str
    qkv: tuple[str, ...]  # one name, or three that are stacked
    o: str
    o_norm: str  # absent in the first layer if norms come before
    up: str
    down: str
    down_norm: str
    final_norm: str = ""


class ScoreHead(msgspec.Struct, frozen=True):
    """Describes a cross-encoder's head, by the names of its tensors."""

    dense: str
    out: str
    activation: str = "tanh"
    norm: str = ""  # empty for none
    mean: bool = False  # it reads the mean over tokens, else the first token
    bias: bool = True  # the dense layer has one


class Encoder(msgspec.Struct, frozen=True):
    """Holds an encoder's sizes and the properties in which architectures differ.

    ``windows`` has each layer's attention window in tokens to each side, 0 for none; ``ropes`` are the rotary
    embeddings of layers without and with a window, empty if positions are looked up in a table.
    """

    names: EncoderNames
    vocab: int
    hidden: int
    inner: int  # width of the MLP
    heads: int
    places: int  # most tokens of a text
    windows: tuple[int, ...]
    eps: float
    activation: str
    first: int = 0  # row of the first token's position in its table
    types: int = 0  # rows of the table of token types; 0 for none
    after: bool = True  # norms come after attention and MLPs, as in BERT; else before
    bias: bool = True  # matrices have biases
    norm_bias: bool = True  # norms have biases
    gated: bool = False  # the MLP's activation is gated
    ropes: tuple[Rope, ...] = ()
    head: ScoreHead | None = None

    def program(self, config: ModelConfig) -> Program:
        """Returns the program of this encoder. Raises CheckpointError."""
        for name in (self.activation, *((self.head.activation,) if self.head else ())):
            if name not in ACTIVATIONS:
                raise config.error("hidden_act", f"is {name!r}; choose from {', '.join(ACTIVATIONS)}")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise config.error("num_attention_heads", f"is {self.heads}; heads must be even parts of {self.hidden}")
        ropes = self.ropes or (Rope("default", 10000.0, {}),)
        return Program(
            ops=(
                *self._embed(),
                *(op for layer in range(len(self.windows)) for op in self._layer(layer)),
                *self._end(),
            ),
            weights=tuple(self._weights()),
            groups=(TOKENS,),
            rope=ropes[0],
            local_ropes=ropes[1:],
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.hidden // self.heads,
            vocab_size=self.vocab * max(1, self.types),
            max_position=self.places + 1,  # room for the token that ends a request
        )

    def _embed(self) -> Iterator[Op]:
        places = None if self.ropes else "places"
        yield EmbedText("words", places, self.first, "types" if self.types else None, "x")
        yield self._norm_op("x", None, "embed_norm", "x")

    def _layer(self, layer: int) -> Iterator[Op]:
        window = self.windows[layer]
        rope = None if not self.ropes else min(int(window > 0), len(self.ropes) - 1)
        bias = (lambda part: f"{layer}.{part}_bias") if self.bias else (lambda part: None)
        source = "x" if self.after or layer == 0 else "h"
        if not self.after and layer:
            yield self._norm_op("x", "down", f"{layer}.o_norm", "h")
        yield Linear(source, f"{layer}.qkv", bias("qkv"), "qkv")
        yield FullAttention("qkv", window, rope, "a")
        yield Linear("a", f"{layer}.o", bias("o"), "o")
        yield self._norm_op("x", "o", f"{layer}.{'o' if self.after else 'down'}_norm", "x" if self.after else "h")
        yield Linear("x" if self.after else "h", f"{layer}.up", bias("up"), "up")
        yield Activate("up", self.activation, self.gated, "g")
        yield Linear("g", f"{layer}.down", bias("down"), "down")
        if self.after:
            yield self._norm_op("x", "down", f"{layer}.down_norm", "x")

    def _end(self) -> Iterator[Op]:
        if not self.after:
            yield self._norm_op("x", "down", "norm", "x")
        if (head := self.head) is not None:
            bias, norm = "score_dense_bias" if head.bias else None, "score_norm" if head.norm else None
            dense = "score_dense", bias, head.activation, norm, self.eps
            yield Classify("x", head.mean, *dense, "score_out", "score_out_bias")

    def _norm_op(self, x: str, delta: str | None, name: str, out: str) -> LayerNorm:
        return LayerNorm(x, delta, name, f"{name}_bias" if self.norm_bias else None, self.eps, out)

    def _weights(self) -> Iterator[Weight]:
        names, hidden = self.names, self.hidden
        yield Weight("words", (f"{names.words}.weight",), ((self.vocab, hidden),))
        if not self.ropes:
            yield Weight("places", (f"{names.places}.weight",), ((self.first + self.places, hidden),))
        if self.types:
            yield Weight("types", (f"{names.types}.weight",), ((self.types, hidden),))
        yield from self._norm("embed_norm", names.embed_norm)
        for layer in range(len(self.windows)):
            yield from self._layer_weights(layer, f"{names.layer}.{layer}.")
        if names.final_norm:
            yield from self._norm("norm", names.final_norm)
        if self.head is not None:
            yield from self._head_weights(self.head)

    def _layer_weights(self, layer: int, at: str) -> Iterator[Weight]:
        names, hidden = self.names, self.hidden
        qkv, up = 3 * hidden // len(names.qkv), self.inner * (2 if self.gated else 1)
        yield from _dense(f"{layer}.qkv", tuple(at + name for name in names.qkv), qkv, hidden, self.bias)
        yield from _dense(f"{layer}.o", (at + names.o,), hidden, hidden, self.bias)
        yield from _dense(f"{layer}.up", (at + names.up,), up, hidden, self.bias)
        yield from _dense(f"{layer}.down", (at + names.down,), hidden, self.inner, self.bias)
        if self.after or layer:
            yield from self._norm(f"{layer}.o_norm", at + names.o_norm)
        yield from self._norm(f"{layer}.down_norm", at + names.down_norm)

    def _head_weights(self, head: ScoreHead) -> Iterator[Weight]:
        yield from _dense("score_dense", (head.dense,), self.hidden, self.hidden, head.bias)
        if head.norm:
            yield Weight("score_norm", (f"{head.norm}.weight",), ((self.hidden,),))
        yield from _dense("score_out", (head.out,), 1, self.hidden, True)

    def _norm(self, name: str, source: str) -> Iterator[Weight]:
        yield Weight(name, (f"{source}.weight",), ((self.hidden,),))
        if self.norm_bias:
            yield Weight(f"{name}_bias", (f"{source}.bias",), ((self.hidden,),))


def scores(config: ModelConfig) -> bool:
    """Returns whether the checkpoint has a head that scores pairs. Raises CheckpointError if the head has more than
    one label.
    """
    named = config.fields.get("architectures") or []
    if not any(isinstance(name, str) and name.endswith(CLASSIFIER) for name in named):
        return False
    labels = config.fields.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.fields.get("num_labels", 2)
    if count != 1:
        raise config.error("id2label", f"has {count} labels; a head that scores pairs has 1")
    return True


def _dense(name: str, sources: tuple[str, ...], rows: int, width: int, bias: bool) -> Iterator[Weight]:
    yield Weight(name, tuple(f"{source}.weight" for source in sources), ((rows, width),) * len(sources))
    if bias:
        yield Weight(f"{name}_bias", tuple(f"{source}.bias" for source in sources), ((rows,),) * len(sources))
