"""Builds decoders whose norms are by mean and variance and have biases, with a gateless MLP or experts.

Knows nothing of tensors or files' formats.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from baton.engine.program.decoder import Decoder, dense
from baton.engine.program.ops import Activate, Center, LayerNorm, Linear, LmHead, Op
from baton.engine.program.program import Weight


class LayerNormDecoder(Decoder, frozen=True):
    """Holds a decoder whose norms, before attention and MLPs and at the end, have biases; MLPs have no gate.

    A factor on logits is one of the last norm's weight and of its bias; ``head_bias`` is added behind it.
    """

    head_bias: bool = False  # logits have a bias

    @classmethod
    def of(cls, plain: Decoder, head_bias: bool = False) -> LayerNormDecoder:
        """Returns ``plain`` with norms by mean and variance; with ``head_bias``, a bias is added to logits."""
        fields = {name: getattr(plain, name) for name in Decoder.__struct_fields__}
        return cls(**fields, head_bias=head_bias)

    def _before(self, layer: int, norm: str, delta: str | None) -> tuple[Op, ...]:
        return (LayerNorm("x", delta, f"{layer}.{norm}", f"{layer}.{norm}_bias", self.eps, "h"),)

    def _end(self) -> tuple[Op, ...]:
        """Returns the last ops; the mean is subtracted before the head, so that its RMS norm is by variance."""
        [head] = super()._end()
        assert isinstance(head, LmHead)
        biased = replace(head, norm_bias="norm_bias", bias="head_bias" if self.head_bias else None)
        return (Center("x", "x"), Center(head.delta, head.delta), biased)

    def _mlp(self, layer: int) -> tuple[Op, ...]:
        if self.experts is not None:
            return super()._mlp(layer)
        up, down = (f"{layer}.{part}_bias" if self.mlp_bias else None for part in ("up", "down"))
        return (
            Linear("h", f"{layer}.up", up, "up"),
            Activate("up", self.activation, False, "g"),
            Linear("g", f"{layer}.down", down, "down"),
        )

    def _weights(self) -> Iterator[Weight]:
        for weight in super()._weights():
            yield weight
            if weight.name == "norm" or weight.name.endswith(("input_norm", "mlp_norm")):
                sources = tuple(f"{source.removesuffix('.weight')}.bias" for source in weight.sources)
                yield Weight(f"{weight.name}_bias", sources, weight.shapes, times=weight.times)
        if self.head_bias:
            yield Weight("head_bias", ("lm_head.bias",), ((self.vocab,),))

    def _mlp_weights(self, layer: int) -> Iterator[Weight]:
        if self.experts is not None:
            yield from super()._mlp_weights(layer)
            return
        at = f"model.layers.{layer}.mlp"
        yield from dense(layer, "up", at, ("c_fc",), (self.inner,), self.hidden, self.mlp_bias)
        yield from dense(layer, "down", at, ("c_proj",), (self.hidden,), self.inner, self.mlp_bias)
