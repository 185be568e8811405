"""gpt-oss's own format: its experts in MXFP4, all of a layer in one tensor, everything else plain.

Knows nothing of models but how gpt-oss names experts. NAME_blocks is uint8 (experts, outputs, inputs / 32, 16), two
numbers a byte, the first in the low bits; NAME_scales uint8 (experts, outputs, inputs / 32), powers of two. Outputs
of gate and up alternate. Source: https://huggingface.co/openai/gpt-oss-20b.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from baton.engine.program.stacked import part_of
from baton.protos.json import Json
from baton.quantize.formats.compressed_tensors import exponents
from baton.quantize.packing import nibbles
from baton.quantize.quantized_weight import QuantizedWeight
from baton.quantize.schemes import MX_BLOCK, Recipe

PLAIN = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
HALVES = ("even", "odd")  # of outputs: gate and up


def settings(recipe: Recipe, ignored: list[str]) -> Json:
    """Returns the ``quantization_config`` of config.json; modules that stay unquantized are told by patterns."""
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(PLAIN)}


def is_gpt_oss(source: str) -> bool:
    """Returns whether ``source`` is a part of a tensor that holds all experts as gpt-oss's do."""
    tensor, part = part_of(source)
    return part is not None and not part.rows and (part.half in HALVES or tensor.endswith(".experts.down_proj"))


def expert_tensors(parts: Mapping[str, QuantizedWeight]) -> dict[str, Tensor]:
    """Returns the blocks and scales of one tensor of all experts; its ``parts`` are by source, expert by expert."""
    (name,) = {part_of(source)[0] for source in parts}
    each = len(parts) // len({part.expert for _, part in map(part_of, parts) if part is not None})
    q = _experts([nibbles(part.q, False) for part in parts.values()], each)
    found = _experts([exponents(part.scales) for part in parts.values()], each)
    return {f"{name}_blocks": q.unflatten(-1, (-1, MX_BLOCK // 2)).contiguous(), f"{name}_scales": found}


def _experts(parts: list[Tensor], each: int) -> Tensor:
    """Returns (experts, outputs, columns) of each expert's ``each`` parts, whose outputs alternate."""
    return torch.stack(parts).unflatten(0, (-1, each)).transpose(1, 2).flatten(1, 2).contiguous()
