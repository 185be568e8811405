"""Bits of weights and KV: what a checkpoint's config.json says is counted, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.planner.costs.model_shape import ModelShape, model_shape
from baton.planner.costs.precision import METHODS, Precision, as_set, of_checkpoint
from baton.planner.costs.worker import worker_costs
from baton.protos.errors import ConfigError

SIZES = {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}


def saved(folder: Path, **more: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES | more))
    return str(folder)


def groups(*weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {str(i): {"weights": w} for i, w in enumerate(weights)},
    }


def bytes_of(shape: ModelShape, linear: float, head: float) -> float:
    table = shape.vocab_size * shape.hidden_size
    return (shape.num_hidden_layers * shape.layer_weights * linear + table * 16 + table * head) / 8


@pytest.mark.parametrize(
    ("settings", "linear", "head"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.25, 16),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "lm_head": True}, 8, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, 4.25, 16),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4.5, 16),
        (groups(INT4), 4.25, 16),
        (groups({"type": "int", "num_bits": 8, "strategy": "channel"}, INT4), 8, 16),
        (groups({"type": "float", "num_bits": 8, "strategy": "channel"}), 8, 16),
        (groups({"type": "float", "num_bits": 8, "block_structure": [128, 128]}), 8.125, 16),
        (groups({"type": "float", "num_bits": 4, "group_size": 32}), 4.5, 16),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.25, 16),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, 16),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.125, 16),
        ({"quant_method": "fp8"}, 8, 16),
    ],
)
def test_a_quantized_checkpoint_takes_the_bits_that_it_has(
    tmp_path: Path, settings: dict[str, Any], linear: float, head: float
) -> None:
    shape = model_shape(saved(tmp_path, quantization_config=settings))
    assert shape.weight_bytes == pytest.approx(bytes_of(shape, linear, head))
    planned = worker_costs(f"roofline:{tmp_path}@h100")
    plain = worker_costs(f"roofline:{saved(tmp_path / 'plain')}@h100")
    assert plain.weights / planned.weights == pytest.approx(bytes_of(shape, 16, 16) / bytes_of(shape, linear, head))
    assert settings["quant_method"] in planned.about


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "hqq"}, "quant_method is 'hqq'; the engine reads awq, bitsandbytes, compressed-tensors"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "quantization_config of fp8"),
        ({"load_in_4bit": True}, "quant_method is None"),
        ("int4", "quant_method is None"),
        ({"quant_method": "gptq", "bits": 5}, "bits is 5"),
        (groups({"type": "int", "num_bits": 2}), "2 bits"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
    ],
)
def test_what_the_engine_does_not_read_is_refused_by_name(tmp_path: Path, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_shape(saved(tmp_path, quantization_config=settings))


def test_the_methods_are_those_that_the_engine_reads() -> None:
    quant = pytest.importorskip("baton.engine.quant")
    assert {*METHODS, "gguf"} == set(quant.in_checkpoints())


def test_a_gguf_takes_the_bits_of_its_file(tmp_path: Path) -> None:
    plain = model_shape(saved(tmp_path))
    with (tmp_path / "model.gguf").open("wb") as file:
        file.truncate(plain.weights * 5 // 8)
    assert model_shape(str(tmp_path)).precision.linear == pytest.approx(5.0)
    (tmp_path / "model.safetensors").touch()
    assert model_shape(str(tmp_path)) == plain


def test_a_checkpoint_that_is_named_as_a_known_model_is_read_all_the_same(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128}
    shape = model_shape(saved(tmp_path / "llama-3.1-8b", quantization_config=settings))
    assert shape.precision.linear == 4.25


def test_rounding_on_load_and_narrow_kv_are_part_of_a_profiles_name() -> None:
    plain, narrow = (worker_costs(f"roofline:llama-3-8b@h100{more}") for more in ("", ",kv_cache_dtype=int8"))
    assert narrow.kv_bytes_per_token == plain.kv_bytes_per_token * 132 // 256
    both = worker_costs("roofline:llama-3-8b@h100,quantization=int8,kv_cache_dtype=int8")
    assert both.weights < 0.6 * plain.weights
    assert dict(both.settings)["quantization"] == "int8"
    assert dict(both.settings)["kv_memory_bytes"] == both.kv_tokens * both.kv_bytes_per_token
    for wrong in (",quantization=int3", ",kv_cache_dtype=int4", ",speed=2", "x0", "xx"):
        with pytest.raises(ConfigError):
            worker_costs(f"roofline:llama-3-8b@h100{wrong}")


def test_every_data_sheet_is_reached_by_its_name() -> None:
    from baton.planner.costs.data_sheets import accelerators

    for name in accelerators():
        assert worker_costs(f"roofline:llama-3-8b@{name}x2").accelerators == 2
        assert worker_costs(f"roofline:llama-3-8b@{name.upper()}").accelerators == 1


def test_what_is_rounded_already_is_not_rounded_again() -> None:
    packed = of_checkpoint({"quantization_config": {"quant_method": "awq", "bits": 4}})
    with pytest.raises(ConfigError, match="awq weights: leave it out"):
        as_set(packed, "int8", "auto")
    assert as_set(Precision(), "none", "auto").plain
