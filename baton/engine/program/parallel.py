"""Builds decoders whose attention and MLP stand side by side behind one norm by mean and variance.

Knows nothing of tensors or files' formats. The mean is taken from the residual stream where it is written, so that
a norm by the root mean square is one by mean and variance.
"""

from __future__ import annotations

from baton.engine.program.decoder import Decoder
from baton.engine.program.ops import Add, Center, Op, RmsNorm


class ParallelDecoder(Decoder, frozen=True):
    """Holds a decoder whose layers add attention's and the MLP's outputs to the residual at once."""

    @classmethod
    def of(cls, plain: Decoder) -> ParallelDecoder:
        """Returns ``plain`` with its layers' parts side by side."""
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
