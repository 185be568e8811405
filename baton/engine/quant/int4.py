"""Quantizes to 4 bits on load: a scale per 32 inputs, held in a float16, 4.5 bits per weight. Knows nothing of
models.

The projection to the vocabulary keeps 8 bits: it alone decides between near tokens, and llama.cpp's Q4_0 keeps it
above 4 bits too.
"""

from __future__ import annotations

from torch import Tensor

from baton.engine.quant import int8
from baton.kernels.linear.packed import PackedWeight, quantize

BITS, GROUP = 4, 32  # bits of a weight, and weights that share a scale


def pack(weight: Tensor) -> PackedWeight:
    """Returns ``weight`` (n, k) quantized to 4 bits with a scale per 32 inputs."""
    return quantize(weight, BITS, GROUP)


pack_head = int8.pack
