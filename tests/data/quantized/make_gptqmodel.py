"""Makes the GPTQModel checkpoints beside it: python make_gptqmodel.py [NAME…], where the library is.

Values that are expected come from the library's own layers (``dequantize_weight``), in float32.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import HERE, SIZES, base, prompts, record
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

RECIPES: dict[str, dict[str, Any]] = {
    "gptqmodel_w4": {"bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "gptqmodel_w3": {"bits": 3, "group_size": 32, "sym": False, "desc_act": False},
    "gptqmodel_awq": {"bits": 4, "group_size": 32, "sym": False, "method": "awq", "format": "gemm"},
}
BIAS = 0.1  # added to some outputs' weights, so that all of a group lie above zero and its zero point is 0


def skewed(directory: Path) -> Path:
    """The common model, some outputs of which have positive weights alone."""
    plain = base(directory, hidden_size=128, intermediate_size=256, head_dim=32)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("proj.weight"):
            weight.data[3::16] = weight.data[3::16].abs() + BIAS
    model.bfloat16().save_pretrained(plain)
    return plain


def dense(layer: nn.Module) -> Tensor:
    """A layer's values, by what it makes of the identity."""
    eye = torch.eye(layer.in_features, dtype=torch.float32)
    return layer(eye).T


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as the model has, because the library wants one."""
    from tokenizers import Tokenizer, models

    words = {f"t{i}": i for i in range(SIZES["vocab_size"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "t0")), pad_token="t0")


def library() -> Any:
    """The library, imported as on eight cores: with two its pools of threads can't be made."""
    os.cpu_count = lambda: 8
    import gptqmodel

    return gptqmodel


def made(plain: Path, name: str) -> None:
    """Makes one."""
    out = HERE / name
    shutil.rmtree(out, ignore_errors=True)
    tokenizer().save_pretrained(plain)
    of = library()
    load, dtype = of.GPTQModel.load, torch.float16 if "awq" in name else torch.float32
    model = load(str(plain), of.QuantizeConfig(**RECIPES[name]), device="cpu", dtype=dtype)
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in prompts()] * 4
    model.quantize(rows, batch_size=1)
    model.save(str(out))
    backend = of.BACKEND.TORCH_AWQ if "awq" in name else of.BACKEND.TORCH
    again = load(str(out), backend=backend, device="cpu", dtype=torch.float16).model  # float32 is not taken there
    record(out, again.float(), dense, ("gptqmodel", "safetensors"))


def main() -> None:
    """All of them, or those that arguments name."""
    with tempfile.TemporaryDirectory() as directory:
        plain = skewed(Path(directory))
        for name in sys.argv[1:] or RECIPES:
            made(plain, name)


if __name__ == "__main__":
    main()
