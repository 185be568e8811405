"""Weights rounded on load: the engine's answers, what tells them from plain ones, the start from the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.checkpoints import weights as loading
from baton.engine.checkpoints.weights import HEAD, load_weights
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.config import ModelConfig
from baton.engine.quant import in_checkpoints, on_load
from baton.kernels.linear.packed import W4, W8, PackedWeight
from baton.protos.errors import CheckpointError, ConfigError
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make, prompts

GREEDY = Sampling(temperature=0.0, max_tokens=1, logprobs=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tied"), "qwen2")


def loaded(directory: Path, **settings: object) -> loading.LoadedWeights:
    config = EngineConfig(str(directory), **settings)  # type: ignore[arg-type]
    read = ModelConfig.read(directory)
    return load_weights(config, directory, read, program_for(read), torch.float32)


def likeliest(directory: Path, **settings: object) -> tuple[int, float]:
    runner = load_runner(EngineConfig(str(directory), threads=1, **settings))  # type: ignore[arg-type]
    prompt = prompts(runner.spec.vocab_size)[3][:60]
    runner.bind(memoryview(bytearray(8 * runner.spec.layout.page_bytes)), 8)
    ask = SampleSpec(GREEDY, 0, len(prompt), prompt, len(prompt))
    found = runner.run(StepPlan((SequenceStep(0, prompt, 0, range(8), ask),))).sampled[0]
    assert found.logprobs is not None
    return found.token_id, found.logprobs.chosen.logprob


@pytest.mark.parametrize(("scheme", "near"), [("int8", 0.3), ("int4", 3.0)])
def test_answers_are_near_the_unquantized_ones(model: Path, tmp_path: Path, scheme: str, near: float) -> None:
    exact = likeliest(model)
    found = likeliest(model, quantization=scheme, cache_dir=str(tmp_path))
    assert abs(found[1] - exact[1]) < near
    assert likeliest(model, quantization=scheme, cache_dir=str(tmp_path)) == found


def test_a_tied_head_is_packed_and_the_table_is_not(model: Path, tmp_path: Path) -> None:
    found = loaded(model, quantization="int4", cache_dir=str(tmp_path))
    assert isinstance(found.weights["embed"], torch.Tensor)
    head, qkv = found.weights[HEAD], found.weights["0.qkv"]
    assert isinstance(head, PackedWeight)
    assert isinstance(qkv, PackedWeight)
    assert (head.kind, qkv.kind) == (W8, W4)
    assert found.program.ops[-1].weight == HEAD  # type: ignore[union-attr]


def test_each_scheme_has_a_fingerprint_of_its_own_and_the_plain_one_stays(model: Path, tmp_path: Path) -> None:
    found = [loaded(model, quantization=s, cache_dir=str(tmp_path)).fingerprint for s in ("none", "int8", "int4")]
    assert len(set(found)) == 3
    assert found[0] == loaded(model).fingerprint
    assert found[1] == loaded(model, quantization="int8", cache_dir=str(tmp_path)).fingerprint


def test_the_second_start_rounds_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loaded(model, quantization="int8", cache_dir=str(tmp_path))
    monkeypatch.setattr(loading, "on_load", lambda name: None)
    again = loaded(model, quantization="int8", cache_dir=str(tmp_path))
    for name, weight in first.weights.items():
        other = again.weights[name]
        if isinstance(weight, PackedWeight):
            assert isinstance(other, PackedWeight)
            weight, other = weight.dequantized(), other.dequantized()
        assert torch.equal(weight, other), name


def test_an_unknown_scheme_is_refused_with_the_list(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"int3.* use none, int8 or int4"):
        load_runner(EngineConfig(str(model), quantization="int3"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="none, int8, int4"):
        on_load("int3")


def test_the_forms_that_checkpoints_come_in_are_the_folders_files() -> None:
    known = "awq, bitsandbytes, compressed-tensors, fp8, gguf, gptq, mxfp4, torchao"
    assert ", ".join(in_checkpoints()) == known


def test_a_checkpoint_of_an_unknown_form_is_refused_with_the_list(tmp_path: Path) -> None:
    directory = make(tmp_path, "llama2", quantization_config={"quant_method": "hqq"})
    with pytest.raises(
        CheckpointError,
        match="'hqq'; known are awq, bitsandbytes, compressed-tensors, fp8, gguf, gptq, mxfp4, torchao",
    ):
        loaded(directory)


MIXED = {"model.layers.0.self_attn.*": "int4", "*.down_proj": "none", "re:.*layers\\.1\\..*_proj": "int8"}


def kind_of(found: loading.LoadedWeights, name: str) -> int | None:
    weight = found.weights[name]
    return weight.kind if isinstance(weight, PackedWeight) else None


def test_layers_that_patterns_name_have_schemes_of_their_own(model: Path, tmp_path: Path) -> None:
    settings = {"quantization": "int4", "quantization_overrides": MIXED | {"lm_head": "none"}}
    found = loaded(model, cache_dir=str(tmp_path), **settings)
    kinds = {name: kind_of(found, name) for name in ("0.qkv", "0.gate_up", "0.down", "1.qkv", "1.gate_up", "head")}
    assert kinds == {"0.qkv": W4, "0.gate_up": W4, "0.down": None, "1.qkv": W8, "1.gate_up": W8, "head": None}
    assert kind_of(found, "1.down") is None, "the first pattern that names a layer decides"
    plain = loaded(model)
    assert torch.equal(found.weights["0.down"], plain.weights["0.down"])  # type: ignore[arg-type]
    assert torch.equal(found.weights[HEAD], plain.weights["embed"])  # type: ignore[arg-type]


def test_overrides_decide_answers_and_are_part_of_the_fingerprint(model: Path, tmp_path: Path) -> None:
    given = {"quantization": "none", "quantization_overrides": {"*_proj": "int8"}, "cache_dir": str(tmp_path)}
    whole, exact = likeliest(model, quantization="int8", cache_dir=str(tmp_path)), likeliest(model)
    mine = likeliest(model, **given)
    assert 0 < abs(mine[1] - exact[1]) < 0.3
    assert mine != whole, "the head is not rounded"
    prints = {
        loaded(model, **given).fingerprint,
        loaded(model).fingerprint,
        loaded(model, quantization="int8", cache_dir=str(tmp_path)).fingerprint,
        loaded(model, **(given | {"quantization_overrides": {"*_proj": "int4"}})).fingerprint,
    }
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"model.layers.9.*": "int8"}, r"'model.layers.9.\*' names no layer that is rounded; layers are named"),
        ({"*.q_proj": "int8"}, r"q_proj is to be int8 and .*k_proj int4, .* multiplied as one weight; name them"),
        ({"*": "int3"}, "quantization 'int3' is unknown; choose none, int8, int4"),
        ({"re:(": "int8"}, r"'re:\(' is no regular expression"),
    ],
    ids=["none", "parts", "scheme", "regex"],
)
def test_an_override_that_cannot_be_is_refused_by_pattern(
    model: Path, tmp_path: Path, overrides: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(model, quantization="int4", quantization_overrides=overrides, cache_dir=str(tmp_path))


def test_experts_take_an_override_as_other_layers_do(tmp_path: Path) -> None:
    directory, cache = make(tmp_path / "moe", "mixtral"), str(tmp_path)
    found = loaded(directory, quantization_overrides={"*.experts.*": "int4"}, cache_dir=cache)
    assert (kind_of(found, "0.experts_gate_up"), kind_of(found, "0.qkv")) == (W4, None)
    likeliest(directory, quantization_overrides={"*.experts.*": "int4"}, cache_dir=cache)
    with pytest.raises(ConfigError, match=r"experts.0.w1 is to be int4 and .*experts.1.w1 int8"):
        loaded(directory, quantization="int8", quantization_overrides={"*.experts.0.*": "int4"}, cache_dir=cache)


def test_a_layers_experts_may_be_rounded_in_one_product_alone(tmp_path: Path) -> None:
    directory, cache = make(tmp_path / "moe", "mixtral"), str(tmp_path)
    settings = {"quantization": "int8", "quantization_overrides": {"*.experts.*.w2": "none"}, "cache_dir": cache}
    found = loaded(directory, **settings)
    down = found.weights["0.experts_down"]
    assert kind_of(found, "0.experts_gate_up") == W8
    assert isinstance(down, torch.Tensor)
    assert down.dtype == torch.float32, "what isn't rounded stays in the engine's dtype"
    assert likeliest(directory, **settings)[1] == pytest.approx(likeliest(directory)[1], abs=0.3)
