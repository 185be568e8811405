"""Makes the AutoAWQ checkpoint beside it: python make_autoawq.py, where the library is.

Values that are expected come from the library's own ``dequantize_gemm``; logits from the plain model over them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from awq import AutoAWQForCausalLM
from awq.utils.packing_utils import dequantize_gemm
from common import HERE, SIZES, base, record
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

NAME, GROUP = "autoawq", 32
SETTINGS: dict[str, Any] = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words that are ids, because the library calibrates on text."""
    words = {f"t{i}": i for i in range(SIZES["vocab_size"])}
    found = Tokenizer(models.WordLevel(words, "t0"))
    found.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="t0", unk_token="t0")


def dense(directory: Path, plain: Path) -> nn.Module:
    """The plain model with the checkpoint's tensors, its packed ones as the library dequantizes them."""
    found = load_file(directory / "model.safetensors")
    packed = {name.removesuffix(".qweight") for name in found if name.endswith(".qweight")}
    own = {name: tensor.float() for name, tensor in found.items() if name.rpartition(".")[0] not in packed}
    for name in packed:
        parts = (found[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
        own[f"{name}.weight"] = dequantize_gemm(*parts, 4, GROUP).T.float()
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    model.load_state_dict(own, strict=False)
    return model


def main() -> None:
    """Has AutoAWQ quantize a tiny model, and writes the checkpoint with what is expected of it."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, SIZES["vocab_size"], (40, 64), generator=generator).tolist()
    text = [" ".join(f"t{i}" for i in row) for row in rows]
    out = HERE / NAME
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as directory:
        plain = base(Path(directory), hidden_size=128, intermediate_size=256, head_dim=32)
        model = AutoAWQForCausalLM.from_pretrained(str(plain), device_map="cpu", torch_dtype=torch.float32)
        model.quantize(
            tokenizer(), quant_config=SETTINGS, calib_data=text, max_calib_samples=16, max_calib_seq_len=64
        )
        model.save_quantized(str(out), safetensors=True)
        record(out, dense(out, plain), lambda layer: layer.weight, ("autoawq", "safetensors"))


if __name__ == "__main__":
    main()
