"""Scales for FP8 KV: they fit what the written checkpoint puts into its KV, and say so where others look."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.protos.errors import ConfigError
from baton.quantize.run import quantize
from baton.quantize.schemes import Recipe
from baton.quantize.source import Source
from tests.quantize.conftest import Made
from tests.quantize.test_run import Samples, loaded

TOP = 448.0


def scales(folder: Path) -> dict[str, torch.Tensor]:
    files = (load_file(path) for path in folder.glob("model-*.safetensors"))
    return {name: t for file in files for name, t in file.items() if name.endswith(("k_scale", "v_scale"))}


def test_scales_are_the_largest_k_and_v_that_transformers_has(
    source: Source, samples: Samples, tmp_path: Path
) -> None:
    recipe = Recipe("rtn", bits=8, group=32, kv_cache_dtype="fp8").checked()
    quantize(source, recipe, samples, tmp_path / "out")
    found = scales(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32)
    with torch.inference_mode():
        cache = model(torch.tensor(samples), use_cache=True).past_key_values
    assert len(found) == 2 * len(cache.layers)
    for at, layer in enumerate(cache.layers):
        for name, stored in (("k", layer.keys), ("v", layer.values)):
            scale = found[f"model.layers.{at}.self_attn.{name}_scale"]
            assert (scale.shape, scale.dtype) == ((1,), torch.float32)
            assert float(scale) * TOP == pytest.approx(float(stored.abs().max()), rel=0.02)


def test_the_scale_of_v_counts_what_folded_factors_make_of_it(
    source: Source, samples: Samples, tmp_path: Path
) -> None:
    quantize(source, Recipe("smoothquant", kv_cache_dtype="fp8").checked(), samples, tmp_path / "out")
    weights, plain = loaded(tmp_path / "out"), source.wide(source.weights)
    x = plain["embed"][torch.tensor(samples)]
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights["0.input_norm"]
    rows = slice(-2 * 32, None)  # of V: two heads of 32
    peak = float((x @ weights["0.qkv"][rows].T + weights["0.qkv_bias"][rows]).abs().max())
    before = float((x @ plain["0.qkv"][rows].T + plain["0.qkv_bias"][rows]).abs().max())
    assert float(scales(tmp_path / "out")["model.layers.0.self_attn.v_scale"]) * TOP == pytest.approx(
        peak, rel=0.01
    )
    assert peak != pytest.approx(before, rel=0.05)


def test_the_engine_takes_fp8_kv_from_such_a_checkpoint(source: Source, samples: Samples, tmp_path: Path) -> None:
    quantize(source, Recipe("fp8", kv_cache_dtype="fp8").checked(), samples, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["kv_cache_scheme"]["type"] == "float"
    config = EngineConfig(str(tmp_path / "out"), threads=1, cache_dir=str(tmp_path / "cache"))
    assert load_runner(config).spec.layout.fidelity == "float32+fp8_e4m3"


def test_without_the_flag_nothing_of_kv_is_written(source: Source, samples: Samples, tmp_path: Path) -> None:
    quantize(source, Recipe("gptq", group=32, format="compressed-tensors").checked(), samples, tmp_path / "out")
    assert not scales(tmp_path / "out")


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (Recipe("fp8", kv_cache_dtype="int8"), r"--kv-cache-dtype 'int8': scales are written for fp8"),
        (Recipe("gptq", kv_cache_dtype="fp8"), r"compressed-tensors, not as gptq; use that --format"),
    ],
)
def test_other_dtypes_and_formats_are_refused(recipe: Recipe, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        recipe.checked()


def test_a_model_whose_layers_keep_something_else_is_refused(made: Made, samples: Samples, tmp_path: Path) -> None:
    recipe = Recipe("fp8", kv_cache_dtype="fp8").checked()
    with pytest.raises(ConfigError, match="whose layers all keep K and V of heads"):
        quantize(Source(str(made("deepseek_v3"))), recipe, samples, tmp_path / "out")
