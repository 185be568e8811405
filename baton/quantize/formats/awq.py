"""AWQ's GEMM format, as AutoAWQ writes it.

Knows nothing of models. qweight int32 (k, n / 8) and qzeros int32 (groups, n / 8), outputs in the order 0 2 4 6 1 3
5 7 from the low bits up; scales float16 (groups, n). Source: https://github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.protos.json import Json
from baton.quantize.packing import words
from baton.quantize.quantized_weight import QuantizedWeight
from baton.quantize.schemes import Recipe

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # places of an int32's eight 4-bit numbers, as AWQ's kernels unpack them


def settings(recipe: Recipe, ignored: list[str]) -> Json:
    """Returns the ``quantization_config`` of config.json; ``ignored`` are the modules that stay unquantized."""
    return {
        "quant_method": "awq",
        "bits": recipe.bits,
        "group_size": recipe.group or -1,
        "zero_point": not recipe.symmetric,
        "version": "gemm",
        "modules_to_not_convert": ignored or None,
    }


def tensors(rounded: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns a linear layer's tensors by name: qweight, qzeros and scales. ``dtype`` is not used."""
    assert rounded.zeros is not None
    return {
        "qweight": _packed(rounded.q.T),
        "qzeros": _packed(rounded.zeros.T.int()),
        "scales": rounded.scales.T.half().contiguous(),
    }


def _packed(numbers: Tensor) -> Tensor:
    reordered = numbers.contiguous().view(len(numbers), -1, 8)[..., torch.tensor(ORDER)]
    return words(reordered.flatten(1), 4)
