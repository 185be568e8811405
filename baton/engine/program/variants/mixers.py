"""Builds decoders in which each layer has a single mixer: a recurrent state, attention or an MLP.

Knows nothing of tensors or files' formats.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine.program.decoder import Decoder, dense
from baton.engine.program.hybrid import HybridDecoder
from baton.engine.program.ops import Activate, Linear, Op, RmsNorm
from baton.engine.program.program import Weight
from baton.protos.nouns import LayerGroup

STATES, ATTENTION, MLP = "states", "attention", "mlp"


class MixerDecoder(HybridDecoder, frozen=True):
    """Holds a decoder whose layers are of ``kinds`` (STATES, ATTENTION or MLP); MLPs have no gate."""

    kinds: tuple[str, ...] = ()

    def _layer(self, layer: int, slot: int) -> tuple[Op, ...]:
        place = self.kinds[:layer].count(self.kinds[layer])
        return (
            RmsNorm("x", "o" if layer else None, f"{layer}.input_norm", self.eps, "h"),
            *self._mixer(layer, place),
        )

    def _mixer(self, layer: int, place: int) -> tuple[Op, ...]:
        if self.kinds[layer] == STATES:
            return self._recurrent.ops(layer, place)
        if self.kinds[layer] == ATTENTION:
            return Decoder._attention(self, layer, place)
        up, down = (f"{layer}.{part}_bias" if self.mlp_bias else None for part in ("up", "down"))
        return (
            Linear("h", f"{layer}.up", up, "up"),
            Activate("up", self.activation, False, "g"),
            Linear("g", f"{layer}.down", down, "o"),
        )

    def _behind(self, out: str) -> str:
        return "o"

    def _attention_weights(self, layer: int) -> Iterator[Weight]:
        if self.kinds[layer] == STATES:
            yield from self._recurrent.weights(layer, self.hidden)
        elif self.kinds[layer] == ATTENTION:
            yield from Decoder._attention_weights(self, layer)

    def _mlp_weights(self, layer: int) -> Iterator[Weight]:
        if self.kinds[layer] == MLP:
            at = f"model.layers.{layer}.mlp"
            yield from dense(layer, "up", at, ("up_proj",), (self.inner,), self.hidden, self.mlp_bias)
            yield from dense(layer, "down", at, ("down_proj",), (self.hidden,), self.inner, self.mlp_bias)

    def _groups(self) -> Iterator[LayerGroup]:
        yield LayerGroup("full", ("k", "v"), self.kinds.count(ATTENTION), self.kv_heads, self.head_dim)
