"""Makes the compressed-tensors checkpoints beside it: python make_llmcompressor.py, where the library is."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import HERE, ROUNDED, base, prompts, record, reloaded
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast
from transformers.utils.quantization_config import CompressedTensorsConfig

LINEAR: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
GROUPS = {
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**W4, "symmetric": False}}},
    "ignore": ["lm_head"],
}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
RECIPES: dict[str, Any] = {
    "ct_fp8_channel": QuantizationModifier(scheme="FP8_DYNAMIC", **LINEAR),
    "ct_fp8_static": QuantizationModifier(scheme="FP8", **LINEAR),
    "ct_fp8_block": QuantizationModifier(scheme="FP8_BLOCK", **LINEAR),
    "ct_mxfp4": QuantizationModifier(scheme="MXFP4", **LINEAR),
    "ct_nvfp4": QuantizationModifier(scheme="NVFP4A16", **LINEAR),
    "ct_gptq_w4": GPTQModifier(**GROUPS),
    "ct_fp8_kv": QuantizationModifier(scheme="FP8", kv_cache_scheme=KV, **LINEAR),
    "ct_smoothquant": [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(scheme="W8A8", **LINEAR)],
}
FP8 = ("ct_fp8_channel", "ct_fp8_static", "ct_fp8_block")


def dense(layer: nn.Module) -> Tensor:
    """Returns a layer's values, which transformers has decompressed by the library's own arithmetic."""
    return layer.weight


def unused() -> PreTrainedTokenizerFast:
    """A tokenizer, because oneshot wants one beside rows of token ids."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), pad_token="a")


def made(plain: Path, name: str) -> None:
    """Makes one. Its expected logits are those of the decompressed model, whose activations are float32."""
    model = reloaded(plain, dtype=torch.float32)
    rows = [
        {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in prompts().repeat(4, 1)
    ]
    given: Any = DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
    oneshot(model=model, dataset=given, recipe=RECIPES[name], processor=unused(), num_calibration_samples=len(rows))
    model.save_pretrained(HERE / name, save_compressed=True)
    again = reloaded(HERE / name, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True))
    record(HERE / name, again, dense, ("llmcompressor", "compressed-tensors", "safetensors"))


def rounded(name: str) -> None:
    """Records what the library makes of an fp8 checkpoint as it is, each layer's inputs being rounded to e4m3."""
    model = reloaded(HERE / name, dtype=torch.float32)
    for layer in model.modules():
        scheme = getattr(layer, "quantization_scheme", None)
        if scheme is None or scheme.input_activations.group_size is None:
            continue
        own = {"group_size": min(128, layer.weight.shape[1])}  # a row that is shorter than a group is refused
        activations = scheme.input_activations.model_copy(update=own)
        layer.quantization_scheme = scheme.model_copy(update={"input_activations": activations})
    with torch.no_grad():
        logits = model(prompts()).logits[:, -1].float().contiguous()
    save_file({"logits": logits}, HERE / name / ROUNDED)


def main() -> None:
    """Makes all of them, or those that arguments name."""
    with tempfile.TemporaryDirectory() as directory:
        plain = base(Path(directory))
        for name in sys.argv[1:] or RECIPES:
            made(plain, name)
            if name in FP8:
                rounded(name)


if __name__ == "__main__":
    main()
