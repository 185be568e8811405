"""Quantized checkpoints that don't hold together: refused by file, tensor or setting, with a remedy."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.protos.errors import CheckpointError
from tests.engine.quant.test_original_libraries import MADE, loaded


def with_settings(directory: Path, name: str, **settings: Any) -> Path:
    """A copy with other settings; None takes one away."""
    shutil.copytree(MADE / name, directory / name)
    path = directory / name / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= settings
    path.write_text(json.dumps(config))
    return directory / name


def with_tensors(directory: Path, name: str, **tensors: Callable[[Tensor], Tensor] | None) -> Path:
    """A copy whose tensors of q's are altered, by the ends of their names; None takes one away."""
    shutil.copytree(MADE / name, directory / name)
    path = directory / name / "model.safetensors"
    held = load_file(path)
    for end, change in tensors.items():
        found = next(key for key in held if "q_proj" in key and key.endswith(end))
        tensor = held.pop(found)
        if change is not None:
            held[found] = change(tensor).contiguous()
    save_file(held, path)
    return directory / name


def said(words: str) -> Tensor:
    return torch.tensor(list(words.encode()), dtype=torch.uint8)


STATE = '{"quant_type": "nf4", "blocksize": %d, "shape": [64, 64]}'
INT4 = {"type": "int", "num_bits": 4, "strategy": "group"}
SETTINGS = [
    ("bnb_nf4", {"bnb_4bit_quant_type": "nf3"}, r"bnb_4bit_quant_type is 'nf3'; nf4 and fp4"),
    ("bnb_nf4", {"load_in_4bit": False}, "neither load_in_4bit nor load_in_8bit; one must be true"),
    ("bnb_int8", {"llm_int8_threshold": "six"}, "llm_int8_threshold is 'six'; it must be 0 or more"),
    ("gptqmodel_w4", {"group_size": 48}, "declares groups of 48: give the size that the model was quantized with"),
    ("gptqmodel_w4", {"group_size": "a"}, "group_size is 'a'; use -1 or a number of inputs"),
    ("autoawq", {"group_size": 64}, "quantization_config declares groups of 64"),
    ("ct_gptq_w4", {"config_groups": {"group_0": None}}, "an object of groups is known"),
    ("ct_gptq_w4", {"config_groups": {"group_0": {"weights": [4]}}}, r"weights is \[4\]; an object is known"),
    (
        "ct_gptq_w4",
        {"config_groups": {"group_0": {"weights": INT4, "input_activations": 8}}},
        "input_activations is 8; an object is known",
    ),
    ("ct_fp8_block", {"transform_config": [0]}, r"can't be read \('list' object has no attribute 'get'\)"),
    ("ct_mxfp4", {"format": "mxfp3"}, "format is 'mxfp3'; known are int-quantized"),
    ("ct_fp8_block", {"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; e4m3 is known"),
    ("ct_fp8_block", {"quant_method": "fp8", "weight_block_size": [128, 24]}, "the second a multiple of 16"),
    (
        "ct_fp8_block",
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        "weight_block_size in config.json must be",
    ),
    ("ct_fp8_block", {"quant_method": "fp8", "activation_scheme": "odd"}, "'odd'; dynamic and static are known"),
]
TENSORS: list[tuple[str, dict[str, Any], str]] = [
    ("gptqmodel_w4", {"scales": lambda t: t * torch.nan}, "scales has a scale or a zero point that isn't finite"),
    ("gptqmodel_w4", {"qweight": lambda t: t.double()}, "is torch.float64, where packed integers are int32"),
    ("gptqmodel_w4", {"qzeros": lambda t: t[0, 0]}, r"qzeros has shape \(\), where a matrix is known"),
    ("bnb_nf4_nested", {"q_proj.weight.absmax": lambda t: t[0]}, "isn't as its form has it"),
    ("autoawq", {"qzeros": lambda t: t.to(torch.int16)}, "is torch.int16, where packed integers are int32"),
    ("ct_gptq_w4", {"weight_zero_point": None}, "has no .*weight_zero_point beside it, though its weights aren't"),
    ("ct_nvfp4", {"weight_global_scale": None}, "has no .*weight_global_scale beside it"),
    ("ct_nvfp4", {"weight_global_scale": lambda t: t[:0]}, r"has shape \(0,\); one number is known"),
    ("ct_nvfp4", {"weight_scale": lambda t: t[:, ::2]}, r"has groups of 32 of 64 inputs; .* declares \[16\]"),
    ("ct_fp8_channel", {"weight_scale": None}, "is float8_e4m3fn and has no scales beside it"),
    ("torchao_int8", {"_weight_scale": lambda t: t[:, :0]}, r"has shape \(64, 0\) for a weight"),
    ("bnb_nf4", {"bitsandbytes__nf4": lambda t: t.double()}, "can't be read as a quant_state"),
    ("bnb_nf4", {"bitsandbytes__nf4": None}, "is missing; save the model by transformers' save_pretrained"),
    ("bnb_nf4", {"bitsandbytes__nf4": lambda _: said("{")}, "can't be read as a quant_state"),
    (
        "bnb_nf4",
        {"bitsandbytes__nf4": lambda _: said(STATE % 24)},
        "whose common divisor is 8; quantize with a blocksize",
    ),
    (
        "bnb_nf4",
        {"bitsandbytes__nf4": lambda _: said(STATE.replace("64]", "32]") % 64)},
        r"is packed for \(64, 32\)",
    ),
    ("bnb_nf4", {"absmax": lambda t: t[:5]}, r"absmax has 5 scales, too few"),
    ("bnb_nf4", {"quant_map": lambda t: t[:8]}, "has 8 numbers, not 16"),
    ("bnb_nf4", {"q_proj.weight": lambda t: t[:100]}, "holds 100 bytes, not 2048"),
    ("bnb_nf4_nested", {"nested_absmax": lambda t: t.repeat(3)}, "nested_absmax has 3 numbers, not 1"),
    ("bnb_int8", {"SCB": lambda t: t[:3]}, r"SCB has shape \(3,\), not \(64,\)"),
    ("bnb_int8", {"q_proj.weight": lambda t: t[:3]}, r"is torch.int8 \(3, 64\), not int8"),
    ("ct_fp8_channel", {"weight_scale": lambda t: t[:3]}, "one number or 64 are known without blocks"),
    ("ct_fp8_channel", {"q_proj.weight": lambda t: torch.full_like(t, torch.nan)}, "holds NaN; it is damaged"),
    (
        "ct_mxfp4",
        {"weight_packed": lambda t: t[:, :5]},
        r"is packed for \(64, 10\), config.json asks for \(64, 64\)",
    ),
    (
        "ct_mxfp4",
        {"weight_scale": lambda t: t[:, :1].repeat(1, 3)},
        "groups must divide them and be multiples of 16",
    ),
    ("ct_mxfp4", {"weight_scale": lambda t: torch.full_like(t, 255)}, "holds NaN"),
    (
        "ct_gptq_w4",
        {"weight_packed": lambda t: t[:, :3]},
        r"has shape \(64, 3\), which is \(64, 64\) by neither 4 nor 8",
    ),
    ("ct_gptq_w4", {"weight_scale": lambda t: t[:7]}, "has a scale or a row of them for each output"),
    ("ct_gptq_w4", {"weight_zero_point": lambda t: t[:, :1]}, "not that of its scales"),
    ("torchao_int8", {"qdata": lambda t: t.int()}, "is torch.int32; int8 and float8_e4m3fn are known: of 4 bits"),
    ("torchao_int8", {"qdata": lambda t: t[:3]}, r"has shape \(3, 64\), config.json asks for \(64, 64\)"),
    (
        "torchao_int8",
        {"scale": lambda t: t.repeat(1, 3)},
        r"has shape \(64, 3\) for .* per group of a multiple of 16",
    ),
    ("torchao_int8", {"zero_point": lambda t: t[:3] + 1}, "not that of its scales"),
    ("torchao_fp8", {"qdata": lambda t: torch.full_like(t, torch.nan)}, "holds NaN; it is damaged"),
]


@pytest.mark.parametrize(("name", "settings", "message"), SETTINGS)
def test_a_setting_is_refused_by_name(name: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as found:
        loaded(with_settings(tmp_path, name, **settings), tmp_path)
    assert re.search(r"(config\.json: quantization_config|model\.safetensors: tensor )", str(found.value))


@pytest.mark.parametrize(("name", "tensors", "message"), TENSORS)
def test_a_tensor_is_refused_by_name_and_file(
    name: str, tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = with_tensors(tmp_path, name, **tensors)
    with pytest.raises(CheckpointError, match=message) as found:
        loaded(directory, tmp_path)
    assert f"{directory / 'model.safetensors'}: tensor model.layers.0.self_attn.q_proj" in str(found.value)
