"""8 bits on load: each row of a weight by its own absmax / 127. Knows nothing of models."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.linear.packed import PackedWeight, quantize

BITS = 8


def pack(weight: Tensor) -> PackedWeight:
    """(n, k) float to W8."""
    return quantize(weight, BITS, group=0)


pack_head = pack
