"""Tests what rows of activations are rounded to beside quantized weights: a choice, held to the original
libraries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.checkpoints.weights import LoadedWeights, load_weights
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.config import ModelConfig
from baton.kernels.linear.packed import A16, CODES, E4M3_A8, E4M3_A16, W4, W4_ORDERED, W8, PackedWeight
from baton.protos.errors import CheckpointError, ConfigError
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.engine.quant.test_bad_checkpoints import with_settings
from tests.engine.quant.test_original_libraries import MADE, prompts

ROUNDED = {
    "bnb_nf4": CODES, "ct_mxfp4": CODES, "ct_gptq_w4": W4, "ct_smoothquant": W8,
    "gptqmodel_w4": W4_ORDERED, "gptqmodel_awq": W4,
    "autoawq": W4,
}  # fmt: skip
FP8 = ("ct_fp8_channel", "ct_fp8_static", "ct_fp8_block")
SAMPLED = Sampling(temperature=0.0, max_tokens=1, logprobs=20)


def loaded(directory: Path, cache: Path, **settings: Any) -> LoadedWeights:
    read = ModelConfig.read(directory)
    config = EngineConfig(str(directory), cache_dir=str(cache), **settings)
    return load_weights(config, directory, read, program_for(read), torch.float32)


def off(directory: Path, cache: Path, wanted: Tensor, **settings: Any) -> float:
    """Returns the mean distance of the likeliest tokens' log-probabilities from ``wanted`` (prompts, tokens)."""
    runner = load_runner(EngineConfig(str(directory), threads=1, cache_dir=str(cache), **settings))
    runner.bind(memoryview(bytearray(8 * runner.spec.layout.page_bytes)), 8)
    errors: list[float] = []
    for tokens, row in zip(prompts(), wanted.log_softmax(-1), strict=True):
        ask = SampleSpec(SAMPLED, 0, len(tokens), tokens, len(tokens))
        found = runner.run(StepPlan((SequenceStep(0, tokens, 0, range(8), ask),))).sampled[0].logprobs
        assert found is not None
        errors += [abs(top.logprob - float(row[top.token_id])) for top in found.top]
    return sum(errors) / len(errors)


def expected(name: str, file: str = "expected") -> Tensor:
    return load_file(MADE / name / f"{file}.safetensors")["logits"]


@pytest.mark.parametrize("name", ROUNDED)
def test_with_bf16_rows_answers_are_nearer_the_libraries_by_far(name: str, tmp_path: Path) -> None:
    packed = loaded(MADE / name, tmp_path, activations="bf16").weights["0.qkv"]
    assert isinstance(packed, PackedWeight)
    assert packed.kind == ROUNDED[name] + A16
    wanted = expected(name)
    near = off(MADE / name, tmp_path, wanted, activations="bf16")
    assert near < 0.011
    assert near < 0.5 * off(MADE / name, tmp_path, wanted)


@pytest.mark.parametrize("name", FP8)
def test_rows_of_e4m3_give_what_the_library_makes_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    packed = loaded(MADE / name, tmp_path, activations="fp8").weights["0.qkv"]
    assert isinstance(packed, PackedWeight)
    assert packed.kind == E4M3_A8
    wanted = expected(name, "expected_fp8")
    near = off(MADE / name, tmp_path, wanted, activations="fp8")
    assert near < 0.012
    assert near < 0.2 * off(MADE / name, tmp_path, wanted), "rows of bf16 are nearer the unrounded ones"


def test_what_is_asked_for_is_part_of_the_fingerprint_and_not_of_what_is_cached(tmp_path: Path) -> None:
    each = [loaded(MADE / "ct_fp8_static", tmp_path, activations=name) for name in ("auto", "bf16", "fp8")]
    assert len({found.fingerprint for found in each}) == 3
    assert len(list((tmp_path / "weights").glob("*.baton"))) == 1
    kinds = [found.weights["0.down"].kind for found in each]  # type: ignore[union-attr]
    assert kinds == [E4M3_A16, E4M3_A16, E4M3_A8]


def test_weights_that_are_rounded_on_load_may_have_bf16_rows_experts_too(tmp_path: Path) -> None:
    directory = make(tmp_path / "moe", "mixtral")
    found = loaded(directory, tmp_path, quantization="int4", activations="bf16").weights
    kinds = {name: weight.kind for name, weight in found.items() if isinstance(weight, PackedWeight)}
    assert kinds["0.experts_gate_up"] == kinds["0.qkv"] == W4 + A16
    assert kinds["head"] == W8 + A16


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("ct_gptq_w4", {"activations": "fp8"}, "no fp8 weights that are meant for fp8 activations; use auto"),
        ("torchao_fp8", {"activations": "fp8"}, "no fp8 weights that are meant for fp8 activations; use auto"),
        ("own/plain", {"activations": "bf16"}, "no weight is quantized; use auto, or set quantization"),
        ("ct_gptq_w4", {"activations": "bf16", "device": "cuda"}, "activations bf16 is known on the cpu only"),
    ],
    ids=["integers", "weight-only fp8", "plain", "cuda"],
)
def test_rows_that_cannot_be_so_are_refused(name: str, settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(MADE / name, tmp_path, **settings)
    with pytest.raises(ConfigError, match="'int4' is unknown; use auto, bf16 or fp8"):
        load_runner(EngineConfig(str(MADE / name), activations="int4"))  # type: ignore[arg-type]


def test_a_scale_of_activations_that_is_no_number_above_0_is_refused_by_name(tmp_path: Path) -> None:
    directory = with_settings(tmp_path, "ct_fp8_static")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.input_scale"] = torch.tensor([-1.0])
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj.input_scale is .* a number above 0"):
        loaded(directory, tmp_path)
