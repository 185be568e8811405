"""bitsandbytes' NF4 format with double quantization, as transformers saves it.

Knows nothing of models. weight is uint8 (n x k / 2, 1), the first of two numbers in the high bits. The largest
magnitude of each block, less their mean, is an index in a table of 256 entries, scaled per 256 blocks; the other
settings are JSON as bytes. Sources: https://arxiv.org/abs/2305.14314, https://arxiv.org/abs/1511.04561 (the table).
"""

from __future__ import annotations

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.protos.json import Json
from baton.quantize.packing import nibbles
from baton.quantize.quantized_weight import QuantizedWeight
from baton.quantize.schemes import Recipe

NESTED = 256  # blocks whose magnitudes share a scale
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def settings(recipe: Recipe, ignored: list[str]) -> Json:
    """Returns the ``quantization_config`` of config.json; ``ignored`` are the modules that stay unquantized."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_skip_modules": ["lm_head", *ignored],
    }


def tensors(rounded: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns a linear layer's tensors by name: weight and those that describe its scales. ``dtype`` is the plain
    weight's.
    """
    assert rounded.codebook is not None
    flat = rounded.scales.flatten()
    offset = flat.mean()
    table = dynamic_table()
    blocks = F.pad(flat - offset, (0, -len(flat) % NESTED)).view(-1, NESTED)
    nested = blocks.abs().amax(1)
    places = _nearest(blocks / nested.clamp_min(1e-30)[:, None], table).flatten()[: len(flat)]
    state = {
        "quant_type": "nf4", "blocksize": rounded.group, "dtype": NAMES[dtype], "shape": list(rounded.q.shape),
        "nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": float(offset),
    }  # fmt: skip
    return {
        "weight": nibbles(rounded.q, True).view(-1, 1),
        "weight.absmax": places.to(torch.uint8),
        "weight.quant_map": rounded.codebook.clone(),  # a file holds no tensor twice
        "weight.nested_absmax": nested,
        "weight.nested_quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(
            bytearray(msgspec.json.encode(state)), dtype=torch.uint8
        ),
    }


def dynamic_table() -> Tensor:
    """Returns bitsandbytes' dynamic 8-bit code: 256 float32 numbers from -1 to 1, ascending, denser towards 0."""
    found = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)
        found += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(found), dtype=torch.float32)


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2)
