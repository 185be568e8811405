"""The config.json of models as they are published, which hold fields that small checkpoints of our own lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "published_configs.json").read_text()
)
ENDS = {"Qwen/Qwen3.5-27B": (248044,), "Qwen/Qwen3-VL-4B-Instruct": (151645,), "openai/gpt-oss-20b": (200002,)}


def written(directory: Path, name: str, **changes: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    return ModelConfig.read(directory)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_is_described_with_its_own_sizes(name: str, tmp_path: Path) -> None:
    config = written(tmp_path, name)
    found, fields = program_for(config), CONFIGS[name] | CONFIGS[name].get("text_config", {})
    assert (found.vocab_size, found.heads) == (fields["vocab_size"], fields["num_attention_heads"])
    states = max([state.layers for state in found.states], default=0)
    assert sum(group.layers for group in found.groups) + states >= fields["num_hidden_layers"] // 2
    assert 4096 <= found.max_position <= fields["max_position_embeddings"]
    assert config.eos_token_ids == ENDS.get(name, config.eos_token_ids)


def test_settings_that_lengthen_the_context_by_yarn_do_so(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    short = written(tmp_path, "Qwen/Qwen3-0.6B", max_position_embeddings=40960)
    assert program_for(short).max_position == 40960
    assert program_for(written(tmp_path, "Qwen/Qwen3-0.6B", rope_scaling=yarn)).max_position == 131072


def test_exaones_layers_are_those_that_are_named_whatever_its_pattern_is_spelled_like(tmp_path: Path) -> None:
    name = "LGAI-EXAONE/EXAONE-4.0-32B"
    assert program_for(written(tmp_path, name)) == program_for(written(tmp_path, name, sliding_window_pattern=4))


@pytest.mark.parametrize(("value", "same"), [(4, True), (0, False)])
def test_llama_4s_first_files_state_tempering_as_a_number(tmp_path: Path, value: int, same: bool) -> None:
    name = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
    text = CONFIGS[name]["text_config"]
    plain, said = (
        program_for(written(tmp_path, name, text_config=text | {"attn_temperature_tuning": each}))
        for each in (same, value)
    )
    assert plain == said


def test_gemmas_first_files_leave_the_activation_open(tmp_path: Path) -> None:
    sizes = {"model_type": "gemma", "vocab_size": 256000, "hidden_size": 2048, "intermediate_size": 16384}
    sizes |= {"num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}
    said = ModelConfig(tmp_path, sizes | {"hidden_act": "gelu", "hidden_activation": None}, ())
    assert program_for(said) == program_for(ModelConfig(tmp_path, sizes, ()))


def test_the_end_of_an_answer_is_found_in_the_generation_config_first_and_in_the_text_models_last(
    tmp_path: Path,
) -> None:
    name = "Qwen/Qwen3.5-27B"
    assert written(tmp_path, name).eos_token_ids == (248044,)
    assert written(tmp_path, name, eos_token_id=7).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [248046, 248044]}))
    assert written(tmp_path, name).eos_token_ids == (248046, 248044)
