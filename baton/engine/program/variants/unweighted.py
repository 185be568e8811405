"""Builds decoders that norm q and k without weights, in layers with a rotary embedding only, as Llama 4 does.

Knows nothing of tensors or files' formats. The norm is applied before the rotation, which changes no length.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Weight


class UnweightedNorms(Decoder, frozen=True):
    """Holds a decoder whose norms of q and k have ones as weights."""

    @classmethod
    def of(cls, plain: Decoder) -> UnweightedNorms:
        """Returns ``plain`` with unweighted norms of q and k."""
        return cls(**{name: getattr(plain, name) for name in Decoder.__struct_fields__})

    def _norms_heads(self, layer: int) -> bool:
        return self.has_rope(layer)

    def _attention_weights(self, layer: int) -> Iterator[Weight]:
        for weight in super()._attention_weights(layer):
            is_norm = weight.name in (f"{layer}.q_norm", f"{layer}.k_norm")
            yield Weight(weight.name, (), weight.shapes, plus=1.0) if is_norm else weight
