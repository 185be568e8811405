"""Quantizes to 8 bits on load: the scale of each row is its absmax / 127. Knows nothing of models."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.linear.packed import PackedWeight, quantize

BITS = 8  # bits of an integer


def pack(weight: Tensor) -> PackedWeight:
    """Returns ``weight`` (n, k) quantized to 8 bits with a scale per row."""
    return quantize(weight, BITS, group=0)


pack_head = pack
