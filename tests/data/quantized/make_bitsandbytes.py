"""Makes the bitsandbytes checkpoints beside it: python make_bitsandbytes.py, where the library is."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from common import HERE, base, record, reloaded
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
FORMS: dict[str, dict[str, Any]] = {
    "bnb_nf4_nested": FOUR | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "bnb_nf4": FOUR | {"bnb_4bit_quant_type": "nf4"},
    "bnb_fp4": FOUR | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "bnb_int8": {"load_in_8bit": True},
}


def dense(layer: nn.Module) -> Tensor:
    """A layer's values by the library's own arithmetic."""
    weight: Any = layer.weight  # its form after the first forward pass
    if weight.dtype == torch.int8:
        return layer.state.CB.float() * layer.state.SCB[:, None] / 127
    state = weight.quant_state
    state.dtype = torch.float32
    return bnb.dequantize_4bit(weight.data, state)


def main() -> None:
    """Writes every form."""
    with tempfile.TemporaryDirectory() as made:
        plain = base(Path(made))
        for name, settings in FORMS.items():
            model = reloaded(plain, quantization_config=BitsAndBytesConfig(**settings))
            model.save_pretrained(HERE / name)
            record(HERE / name, reloaded(HERE / name), dense, ("bitsandbytes", "safetensors"))


if __name__ == "__main__":
    main()
