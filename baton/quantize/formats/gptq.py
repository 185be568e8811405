"""GPTQ's format, as AutoGPTQ and GPTQModel write it.

Knows nothing of models. qweight int32 (k / per, n) from the low bits up; qzeros int32 (groups, n / per): packed
words of zeros, less a word of ones; scales float16 (groups, n); g_idx int32 (k,). Source:
https://github.com/AutoGPTQ/AutoGPTQ.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from baton.protos.json import Json
from baton.quantize.methods.inverse_factor import DAMP
from baton.quantize.packing import words
from baton.quantize.quantized_weight import QuantizedWeight, group_numbers
from baton.quantize.schemes import Recipe


def settings(recipe: Recipe, ignored: list[str]) -> Json:
    """Returns the ``quantization_config`` of config.json; ``ignored`` are the modules that stay unquantized, told
    as GPTQModel tells them, by patterns in ``dynamic``.
    """
    dynamic: Json = {"dynamic": {f"-:^{re.escape(module)}$": {} for module in ignored}} if ignored else {}
    return {
        "quant_method": "gptq",
        "bits": recipe.bits,
        "group_size": recipe.group or -1,
        "desc_act": recipe.regroup,
        "sym": recipe.symmetric,
        "damp_percent": DAMP,
        "static_groups": not recipe.regroup,
        "true_sequential": True,
        "checkpoint_format": "gptq",
        "lm_head": False,
        "modules_in_block_to_quantize": None,
        **dynamic,
    }


def tensors(rounded: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns a linear layer's tensors by name: qweight, qzeros, scales and g_idx. ``dtype`` is not used."""
    assert rounded.zeros is not None
    k, ones = rounded.q.shape[1], sum(1 << at for at in range(0, 32, rounded.bits))
    of = rounded.groups_of if rounded.groups_of is not None else group_numbers(k, rounded.group)
    return {
        "qweight": words(rounded.q, rounded.bits).T.contiguous(),
        "qzeros": words(rounded.zeros.T.int(), rounded.bits) - ones,
        "scales": rounded.scales.T.half().contiguous(),
        "g_idx": of.int(),
    }
