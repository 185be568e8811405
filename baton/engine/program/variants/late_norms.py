"""Builds decoders that norm q and k head by head after they are rotated, as Hunyuan does.

Knows nothing of tensors or files' formats. The rotation is an op of its own, so that the op which stores K norms it
and rotates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from baton.engine.program.decoder import Decoder, with_rope_in
from baton.engine.program.ops import Op, RotateHeads


class LateNorms(Decoder, frozen=True):
    """Holds a decoder whose q and k are rotated, then normed."""

    @classmethod
    def of(cls, plain: Decoder) -> LateNorms:
        """Returns ``plain`` with norms of q and k after the rotation, in all layers."""
        ropeless = with_rope_in(replace(plain, qk_norm=True), (False,) * len(plain.windows))
        return cls(**{name: getattr(ropeless, name) for name in Decoder.__struct_fields__})

    def _before_rope(self, layer: int) -> Iterator[Op]:
        yield RotateHeads("qkv", "qkv")
