"""Builds decoders in which attention and MLP read the same norm, by mean and variance, and are added to the
residual together.

Knows nothing of tensors or files' formats. The mean is subtracted from the residual stream where it is written, so
that an RMS norm computes the norm by mean and variance.
"""

from __future__ import annotations

from baton.engine.program.decoder import Decoder
from baton.engine.program.ops import Add, Center, Op, RmsNorm


class ParallelDecoder(Decoder, frozen=True):
    """Holds a decoder whose layers add the outputs of attention and MLP to the residual at once."""

    @classmethod
    def of(cls, plain: Decoder) -> ParallelDecoder:
        """Returns ``plain`` with attention and MLP in parallel."""
        return cls(**{name: getattr(plain, name) for name in Decoder.__struct_fields__})

    def _layer(self, layer: int, slot: int) -> tuple[Op, ...]:
        first = (Center("x", "x"),) if layer == 0 else ()
        return (
            *first,
            RmsNorm("x", "o" if layer else None, f"{layer}.input_norm", self.eps, "h"),
            *self._attention(layer, slot),
            *self._mlp(layer),
            Add("o", "down"),
            Center("o", "o"),
        )

    def _behind(self, out: str) -> str:
        return "o"
