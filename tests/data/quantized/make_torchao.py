"""Makes the torchao checkpoints beside it: python make_torchao.py [NAME…], where the library is."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import HERE, base, record, reloaded
from torch import Tensor, nn
from torchao.quantization import Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from transformers import TorchAoConfig

RECIPES: dict[str, Any] = {
    "torchao_int8": lambda: Int8WeightOnlyConfig(version=2),
    "torchao_w8a8": lambda: Int8DynamicActivationInt8WeightConfig(version=2),
    "torchao_fp8": lambda: Float8WeightOnlyConfig(version=2),
}


def dense(layer: nn.Module) -> Tensor:
    """A layer's values, as the library dequantizes them, or what the layer makes of the identity."""
    weight = layer.weight
    return weight.dequantize() if hasattr(weight, "dequantize") else layer(torch.eye(layer.in_features)).T


def made(plain: Path, name: str) -> None:
    """Makes one."""
    out = HERE / name
    shutil.rmtree(out, ignore_errors=True)
    model = reloaded(plain, dtype=torch.bfloat16, quantization_config=TorchAoConfig(RECIPES[name]()))
    model.save_pretrained(out)
    record(out, reloaded(out, dtype=torch.bfloat16), dense, ("torchao", "safetensors"))


def main() -> None:
    """Makes all of them, or those that arguments name."""
    with tempfile.TemporaryDirectory() as directory:
        plain = base(Path(directory))
        for name in sys.argv[1:] or RECIPES:
            made(plain, name)


if __name__ == "__main__":
    main()
