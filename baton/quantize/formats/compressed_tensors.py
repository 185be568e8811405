"""compressed-tensors' formats: packed integers, int8 with int8 activations, e4m3, MXFP4.

Knows nothing of models. Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.protos.json import Json
from baton.quantize.grids import E4M3_TOP
from baton.quantize.packing import nibbles, words
from baton.quantize.quantized_weight import QuantizedWeight
from baton.quantize.schemes import MX_BLOCK, Recipe

BIAS = 127  # of E8M0 exponents


def settings(recipe: Recipe, ignored: list[str]) -> Json:
    """Returns the ``quantization_config`` of config.json; ``ignored`` are the modules that stay unquantized."""
    form, weights, inputs = _schemes(recipe)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", *ignored],
        "kv_cache_scheme": _numbers("float", 8, "tensor") if recipe.kv_cache_dtype else None,
        "config_groups": {"group_0": group},
    }


def _schemes(recipe: Recipe) -> tuple[str, Json, Json | None]:
    """Returns the format's name, the scheme of the weights, and that of the activations (None: unquantized)."""
    if recipe.method == "fp8":
        return "float-quantized", _numbers("float", 8, "channel"), _numbers("float", 8, "token", dynamic=True)
    if recipe.method == "mxfp4":
        return (
            "mxfp4-pack-quantized",
            _numbers("float", 4, "group", MX_BLOCK) | {"scale_dtype": "torch.uint8"},
            None,
        )
    if recipe.method == "smoothquant":
        return "int-quantized", _numbers("int", 8, "channel"), _numbers("int", 8, "token", dynamic=True)
    strategy = "group" if recipe.group else "channel"
    weights = _numbers("int", recipe.bits, strategy, recipe.group or None) | {"symmetric": recipe.symmetric}
    return "pack-quantized", weights, None


def _numbers(kind: str, bits: int, strategy: str, group: int | None = None, dynamic: bool = False) -> Json:
    return {
        "type": kind, "num_bits": bits, "strategy": strategy, "group_size": group, "symmetric": True,
        "dynamic": dynamic,
    }  # fmt: skip


def tensors(rounded: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns a linear layer's tensors by name, in the format that fits ``rounded``; ``dtype`` is not used.

    8-bit integers with float32 scales become int8 weights for W8A8, other integers packed words.
    """
    if rounded.codebook is not None and rounded.bits == 4:
        return {"weight_packed": nibbles(rounded.q, False), "weight_scale": exponents(rounded.scales)}
    if rounded.codebook is not None:
        assert float(rounded.codebook.max()) == E4M3_TOP
        return {"weight": rounded.q.to(torch.uint8).view(torch.float8_e4m3fn), "weight_scale": rounded.scales}
    return _packed(rounded) if rounded.bits == 4 or not rounded.wide else _bytes(rounded)


def exponents(scales: Tensor) -> Tensor:
    """Returns powers of two as E8M0 exponents, uint8."""
    return (torch.log2(scales).round().int() + BIAS).to(torch.uint8)


def _packed(rounded: QuantizedWeight) -> dict[str, Tensor]:
    found = {
        "weight_packed": words(rounded.q, rounded.bits),
        "weight_scale": rounded.scales.half(),
        "weight_shape": torch.tensor(rounded.q.shape),
    }
    if rounded.is_symmetric:
        return found
    assert rounded.zeros is not None
    return found | {"weight_zero_point": words(rounded.zeros.T.int(), rounded.bits).T.contiguous()}


def _bytes(rounded: QuantizedWeight) -> dict[str, Tensor]:
    assert rounded.zeros is not None
    found = {"weight": (rounded.q - 128).to(torch.int8), "weight_scale": rounded.scales}
    return found if rounded.is_symmetric else found | {"weight_zero_point": (rounded.zeros - 128).to(torch.int8)}
