"""Builds decoders of which each layer computes one of several residual streams and corrects the others by it, and
whose last layers read the K and V of earlier ones, as Gemma 3n does.

Knows nothing of tensors or files' formats. Beside the streams (AltUp, https://arxiv.org/abs/2301.13310) there are a
second way around attention through a narrow product (LAuReL, https://arxiv.org/abs/2411.07501), inputs of each
layer's own, which are looked up by token, and gates of which most are 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine.program.decoder import Decoder, dense
from baton.engine.program.ops import (
    Add,
    AddToEach,
    CorrectStreams,
    Divide,
    GateInputs,
    GeGlu,
    LayerInputs,
    Linear,
    LmHead,
    MatchSize,
    NormPart,
    Op,
    PagedAttention,
    PredictStreams,
    RmsNorm,
    RopeAppend,
    RotateQueries,
    Sparsen,
    SumRows,
)
from baton.engine.program.program import Weight
from baton.engine.program.shared_kv import owners_slots
from baton.protos.nouns import LayerGroup

HALF_ROOT = 2**-0.5  # two rows of one variance are added with this factor


class StreamDecoder(Decoder, frozen=True):
    """Holds a decoder with several residual streams; its norms are around attention and MLPs.

    ``inners`` has each layer's MLP width, ``deviations`` how many standard deviations above the mean a gate begins
    to count, None for all gates; ``kv_of`` the layer whose K and V each layer reads.
    """

    inners: tuple[int, ...] = ()
    deviations: tuple[float | None, ...] = ()
    kv_of: tuple[int, ...] = ()
    streams: int = 2
    narrow: int = 1  # width of the second way around attention
    own_inputs: int = 1  # columns of each layer's own inputs
    own_vocab: int = 1  # tokens that have such inputs; others have those of token 0
    gain: bool = True  # the first stream is scaled by a vector before it gates a layer's own inputs

    @classmethod
    def of(cls, plain: Decoder, **differences: object) -> StreamDecoder:
        """Returns ``plain`` with further fields of this class."""
        fields = {name: getattr(plain, name) for name in Decoder.__struct_fields__}
        return cls(**fields, **differences)  # type: ignore[arg-type]

    def _slots(self) -> tuple[int, ...]:
        return owners_slots(self.windows, self.kv_of)

    def _groups(self) -> Iterator[LayerGroup]:
        kept = [window for layer, window in enumerate(self.windows) if self.kv_of[layer] == layer]
        for window in sorted(set(kept)):
            kind = "window" if window else "full"
            yield LayerGroup(kind, ("k", "v"), kept.count(window), self.kv_heads, self.head_dim, window)

    def _idle(self) -> tuple[str, ...]:
        readers = (layer for layer, owner in enumerate(self.kv_of) if owner != layer)
        return tuple(f"model.layers.{at}.self_attn.{one}" for at in readers for one in ("k_proj", "v_proj"))

    def _begin(self) -> tuple[Op, ...]:
        """Returns the ops behind the embedding: each layer's own inputs, and the further streams."""
        eps, scale = self.eps * self.hidden, self.own_inputs**0.5  # of rows that aren't scaled by hidden^-1/2
        return (
            *super()._begin(),
            Linear("x", "inputs_project", None, "inputs"),
            LayerInputs("inputs", "inputs_table", "inputs_norm", self.own_inputs, eps, scale, "inputs"),
            Linear("x", "streams_in", None, "streams"),
            MatchSize("x", "streams", "streams"),
        )

    def _end(self) -> tuple[Op, ...]:
        """Returns the last ops: the mean of all streams, each as large as the first, into the head."""
        numbers, head = range(1, self.streams), "embed" if self.tied else "head"
        apart = tuple(f"stream {at}" for at in numbers)
        others = [
            op
            for at in numbers
            for op in (
                Linear(f"stream {at}", f"streams_out{at}", None, f"out {at}"),
                MatchSize("x", f"out {at}", f"out {at}"),
            )
        ]
        return (
            Divide("streams", (self.hidden,) * len(numbers), apart),
            *others,
            SumRows(("x",), 1 / self.streams, "first part"),
            SumRows(tuple(f"out {at}" for at in numbers), 1 / self.streams, "other parts"),
            LmHead("first part", "other parts", "norm", self.eps, head, self.final_softcap),
        )

    def _layer(self, layer: int, slot: int) -> tuple[Op, ...]:
        eps = self.eps
        mixed = f"{layer}.router_norm", f"{layer}.router"
        return (
            PredictStreams("x", "streams", *mixed, f"{layer}.predict", eps),
            RmsNorm("x", None, f"{layer}.input_norm", eps, "h"),
            Linear("h", f"{layer}.narrow", None, "narrow"),
            Linear("narrow", f"{layer}.widen", None, "wide"),
            RmsNorm("wide", None, f"{layer}.widen_norm", eps, "wide_normed"),
            *self._attention(layer, slot),
            RmsNorm("o", None, f"{layer}.o_norm", eps, "o_normed"),
            SumRows(("x", "o_normed", "h", "wide_normed"), HALF_ROOT, "y"),
            RmsNorm("y", None, f"{layer}.mlp_norm", eps, "m"),
            *self._mlp(layer),
            RmsNorm("down", None, f"{layer}.down_norm", eps, "down_normed"),
            Add("y", "down_normed"),
            CorrectStreams("x", "streams", "y", *mixed, f"{layer}.correct", eps, self._gain(layer), "gained"),
            Linear("gained", f"{layer}.inputs_gate", None, "inputs_gate"),
            GateInputs("inputs_gate", "inputs", layer * self.own_inputs, "own"),
            Linear("own", f"{layer}.inputs_out", None, "more"),
            RmsNorm("more", None, f"{layer}.inputs_out_norm", eps, "more_normed"),
            AddToEach("streams", "more_normed"),
        )

    def _gain(self, layer: int) -> str | None:
        return f"{layer}.gain" if self.gain else None

    def _attention(self, layer: int, slot: int) -> tuple[Op, ...]:
        shares = self.kv_of[layer] != layer
        read, made = ("queries", self._queries(layer)) if shares else ("q", self._with_kv(layer, slot))
        return (
            *made,
            PagedAttention(read, slot, self.windows[layer], "a"),
            Linear("a", f"{layer}.o", f"{layer}.o_bias" if self.o_bias else None, "o"),
        )

    def _queries(self, layer: int) -> tuple[Op, ...]:
        """Returns the ops that make the queries of a layer that reads another's K and V."""
        bias = f"{layer}.q_bias" if self.qkv_bias else None
        return (
            Linear("h", f"{layer}.q", bias, "queries"),
            RotateQueries("queries", f"{layer}.q_norm", self.eps, self.ropes[layer], "queries"),
        )

    def _with_kv(self, layer: int, slot: int) -> tuple[Op, ...]:
        """Returns the ops that make queries and store K and V; values are normed head by head, without a weight."""
        first, bias = (self.heads + self.kv_heads) * self.head_dim, f"{layer}.qkv_bias" if self.qkv_bias else None
        values = (first + head * self.head_dim for head in range(self.kv_heads))
        norms = f"{layer}.q_norm", f"{layer}.k_norm"
        return (
            Linear("h", f"{layer}.qkv", bias, "qkv"),
            *(NormPart("qkv", at, self.head_dim, "v_norm", self.eps) for at in values),
            RopeAppend("qkv", slot, *norms, self.eps, "q", self.ropes[layer]),
        )

    def _mlp(self, layer: int) -> tuple[Op, ...]:
        gates = f"gates {self.inners[layer]}"  # layers of other widths have other registers
        inner = f"inner {self.inners[layer]}"
        deviations = self.deviations[layer]
        cut = () if deviations is None else (Sparsen(gates, deviations, gates),)
        return (
            Linear("m", f"{layer}.gate_up", None, gates),
            *cut,
            GeGlu(gates, inner),
            Linear(inner, f"{layer}.down", None, "down"),
        )

    # ---- weights -------------------------------------------------------------------------------------

    def _weights(self) -> Iterator[Weight]:
        yield from super()._weights()
        columns, hidden = len(self.windows) * self.own_inputs, self.hidden
        yield Weight("v_norm", (), ((self.head_dim,),), plus=1.0)
        yield Weight("inputs_table", ("model.embed_tokens_per_layer.weight",), ((self.own_vocab, columns),))
        yield Weight("inputs_project", ("model.per_layer_model_projection.weight",), ((columns, hidden),))
        yield self._norm("inputs_norm", "model.per_layer_projection_norm", self.own_inputs)
        others = range(self.streams - 1)
        sources = tuple(f"model.altup_projections.{at}.weight" for at in others)
        yield Weight("streams_in", sources, ((hidden, hidden),) * len(others))
        for at in others:
            source = f"model.altup_unembed_projections.{at}.weight"
            yield Weight(f"streams_out{at + 1}", (source,), ((hidden, hidden),))

    def _attention_weights(self, layer: int) -> Iterator[Weight]:
        if self.kv_of[layer] == layer:
            yield from super()._attention_weights(layer)
        else:
            at, q = f"model.layers.{layer}.self_attn", self.heads * self.head_dim
            yield from dense(layer, "q", at, ("q_proj",), (q,), self.hidden, self.qkv_bias)
            yield from dense(layer, "o", at, ("o_proj",), (self.hidden,), q, self.o_bias)
            yield self._norm(f"{layer}.q_norm", f"{at}.q_norm", self.head_dim)
        yield from self._stream_weights(layer)

    def _stream_weights(self, layer: int) -> Iterator[Weight]:
        at, n, hidden, own = f"model.layers.{layer}", self.streams, self.hidden, self.own_inputs
        yield self._norm(f"{layer}.router_norm", f"{at}.altup.router_norm", hidden)
        yield Weight(f"{layer}.router", (f"{at}.altup.modality_router.weight",), ((n, hidden),))
        yield Weight(f"{layer}.predict", (f"{at}.altup.prediction_coefs.weight",), ((n * n, n),))
        yield Weight(f"{layer}.correct", (f"{at}.altup.correction_coefs.weight",), ((n, n),))
        if self.gain:
            yield Weight(f"{layer}.gain", (f"{at}.altup.correct_output_scale",), ((hidden,),))
        yield from dense(layer, "narrow", at, ("laurel.linear_left",), (self.narrow,), hidden, False)
        yield from dense(layer, "widen", at, ("laurel.linear_right",), (hidden,), self.narrow, False)
        yield self._norm(f"{layer}.widen_norm", f"{at}.laurel.post_laurel_norm", hidden)
        yield from dense(layer, "inputs_gate", at, ("per_layer_input_gate",), (own,), hidden, False)
        yield from dense(layer, "inputs_out", at, ("per_layer_projection",), (hidden,), own, False)
        yield self._norm(f"{layer}.inputs_out_norm", f"{at}.post_per_layer_input_norm", hidden)

    def _mlp_weights(self, layer: int) -> Iterator[Weight]:
        at, inner = f"model.layers.{layer}.mlp", self.inners[layer]
        yield from dense(layer, "gate_up", at, ("gate_proj", "up_proj"), (inner,) * 2, self.hidden, False)
        yield from dense(layer, "down", at, ("down_proj",), (self.hidden,), inner, False)
