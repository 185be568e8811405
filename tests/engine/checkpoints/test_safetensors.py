"""Tests loading: every way a checkpoint can be bad gives a CheckpointError that names the file or the field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.checkpoints.hub import locate
from baton.engine.checkpoints.safetensors import INDEX, Checkpoint
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.program.program import Weight
from baton.protos.errors import CheckpointError, ConfigError
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make, prompts
from tests.conformance.drive import Driver


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("single"), "llama2", hidden_size=32, intermediate_size=48, vocab_size=64)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(
        tmp_path_factory.mktemp("sharded"), "llama2", shards=4, hidden_size=32, intermediate_size=48, vocab_size=64
    )


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    return lambda source: Path(shutil.copytree(source, tmp_path / "copy"))


def edit(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def refused(directory: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        load_runner(EngineConfig(str(directory), threads=1))


def test_an_unknown_architecture_lists_the_choices(single: Path, copy: Callable[[Path], Path]) -> None:
    choices = "llama, .*mistral, .*mixtral, .*qwen2, .*qwen3, .*qwen3_moe"
    refused(edit(copy(single), model_type="gpt9"), rf"config\.json.*gpt9.*{choices}")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": 40}, r"shape \(64, 32\), config.json asks for \(64, 40\)"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.input_layernorm\.weight is missing"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral.*choose from default, dynamic, linear"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope has 0 factors for 4 frequencies"),
        ({"rope_parameters": {"rope_type": "linear"}}, "linear.*needs factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eos_token_id": 64}, "eos_token_id"),
    ],
)
def test_a_bad_field_is_named(
    single: Path, copy: Callable[[Path], Path], changes: dict[str, Any], match: str
) -> None:
    directory = copy(single)
    (directory / "generation_config.json").unlink(missing_ok=True)
    refused(edit(directory, **changes), match)


def test_a_missing_shard_is_named(sharded: Path, copy: Callable[[Path], Path]) -> None:
    directory = copy(sharded)
    gone = sorted(directory.glob("*.safetensors"))[1]
    gone.unlink()
    refused(directory, rf"{gone.name} is missing")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(single: Path, copy: Callable[[Path], Path], keep: int) -> None:
    directory = copy(single)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(directory, r"model\.safetensors.*damaged or truncated")


def test_a_tensor_that_the_index_promises_but_no_shard_holds_is_named(
    sharded: Path, copy: Callable[[Path], Path]
) -> None:
    directory = copy(sharded)
    file = sorted(directory.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    refused(directory, rf"{file.name}.*{name}")


def test_other_damage_is_named(single: Path, sharded: Path, copy: Callable[[Path], Path], tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such directory")
    refused(single / "config.json", "is a file")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, r"config\.json is missing")
    directory = copy(single)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(directory, "only safetensors")
    (directory / INDEX).write_text('{"weight_map": 3}')
    refused(directory, INDEX)
    (directory / "config.json").write_text("{")
    refused(directory, r"config\.json can't be read")


def test_a_hub_id_that_is_nowhere_fails_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=r"someone/some-model.*no route"):
        locate("someone/some-model")


def test_shards_and_one_file_are_the_same_model(single: Path, sharded: Path) -> None:
    one, many = (load_runner(EngineConfig(str(path), threads=1)).spec for path in (single, sharded))
    assert one == many
    assert len(one.fingerprint) == 64


def test_the_fingerprint_sees_one_changed_number(single: Path, copy: Callable[[Path], Path]) -> None:
    directory = copy(single)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, file)
    assert Checkpoint(directory).fingerprint({}) != Checkpoint(single).fingerprint({})


def test_sources_are_stacked_and_converted(single: Path) -> None:
    names = tuple(f"model.layers.0.self_attn.{p}_proj.weight" for p in "qk")
    weight = Weight("qk", names, ((32, 32), (32, 32)))
    found = Checkpoint(single).weights([weight], torch.bfloat16, "cpu")["qk"]
    raw = load_file(single / "model.safetensors")
    assert torch.equal(found, torch.cat([raw[name] for name in names]).bfloat16())


def test_settings_out_of_range_are_named(single: Path) -> None:
    for changes in ({"dtype": "int8"}, {"device": "tpu"}, {"threads": 0}, {"max_model_len": 0}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            load_runner(EngineConfig(str(single), **changes))  # type: ignore[arg-type]


def test_a_context_beyond_the_models_own_is_refused_but_for_a_draft(single: Path) -> None:
    def longest(asked: int | None, is_draft: bool = False) -> int:
        config = EngineConfig(str(single), max_model_len=asked, threads=1, is_draft=is_draft)
        return load_runner(config).spec.max_model_len

    assert (longest(None), longest(100), longest(10**6, is_draft=True)) == (1024, 100, 1024)
    with pytest.raises(ConfigError, match="was made for contexts of 1024 tokens: lower it") as refused:
        longest(1025)
    assert refused.value.param == "max_model_len"


def test_generation_config_says_which_ids_end_a_text(single: Path, copy: Callable[[Path], Path]) -> None:
    directory = edit(copy(single), eos_token_id=3)
    (directory / "generation_config.json").unlink(missing_ok=True)
    assert load_runner(EngineConfig(str(directory), threads=1)).spec.eos_token_ids == (3,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert load_runner(EngineConfig(str(directory), threads=1)).spec.eos_token_ids == (1, 2)


def test_a_float16_checkpoint_answers_as_its_values_in_float32_do(tmp_path: Path) -> None:
    wide = make(tmp_path / "wide", "qwen2")
    halves = {name: tensor.half() for name, tensor in load_file(wide / "model.safetensors").items()}
    found = []
    for name, tensors in (("half", halves), ("same", {name: t.float() for name, t in halves.items()})):
        shutil.copytree(wide, tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors")
        runner = load_runner(EngineConfig(str(tmp_path / name), threads=1))
        asked = [prompt[:40] for prompt in prompts(runner.spec.vocab_size, count=3)]
        found.append(Driver(runner, pages=30).answer(asked, Sampling(temperature=0.0, max_tokens=5)))
    assert found[0] == found[1]
