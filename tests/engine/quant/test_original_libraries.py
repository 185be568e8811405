"""Checkpoints that the original libraries made (tests/data/quantized): their values, and the answers from them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.checkpoints.weights import LoadedWeights, load_weights
from baton.engine.load import EngineConfig, load_runner
from baton.engine.models import program_for
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.config import ModelConfig
from baton.kernels.linear.packed import CODES, E4M3_A16, W4, W8, W8_OUTLIERS, PackedWeight
from baton.protos.nouns import Sampling

MADE = Path(__file__).parents[2] / "data" / "quantized"
PLACES = {"self_attn.q_proj": ("0.qkv", slice(0, 64)), "mlp.down_proj": ("0.down", slice(0, 64))}


class Case(NamedTuple):
    """The kind of its weights; how far their values may be off (as a share), and log-probabilities."""

    kind: int
    values: float
    answers: float


HALF = 6e-4  # of scales that become float16
TABLE = 6e-3  # of tables that become int8
# compressed-tensors itself rounds NVFP4's products to bfloat16, hence 2e-3.
CASES = {
    "bnb_nf4": Case(CODES, TABLE, 0.1),
    "bnb_nf4_nested": Case(CODES, TABLE, 0.1),
    "bnb_fp4": Case(CODES, TABLE, 0.1),
    "ct_fp8_channel": Case(E4M3_A16, 1e-6, 0.05),
    "ct_fp8_static": Case(E4M3_A16, 1e-6, 0.05),
    "ct_fp8_block": Case(E4M3_A16, HALF, 0.05),
    "ct_mxfp4": Case(CODES, 1e-6, 0.1),
    "ct_nvfp4": Case(CODES, 2e-3, 0.1),
    "ct_gptq_w4": Case(W4, HALF, 0.1),
    "ct_smoothquant": Case(W8, 1e-6, 0.1),
    "bnb_int8": Case(W8_OUTLIERS, 1e-6, 0.1),
}


def loaded(directory: Path, cache: Path) -> LoadedWeights:
    read = ModelConfig.read(directory)
    config = EngineConfig(str(directory), cache_dir=str(cache))
    return load_weights(config, directory, read, program_for(read), torch.float32)


def answers(directory: Path, cache: Path) -> list[tuple[int, float]]:
    """Each prompt's likeliest token and its log-probability."""
    runner = load_runner(EngineConfig(str(directory), threads=1, cache_dir=str(cache)))
    runner.bind(memoryview(bytearray(8 * runner.spec.layout.page_bytes)), 8)
    found = []
    for tokens in prompts():
        ask = SampleSpec(Sampling(temperature=0.0, max_tokens=1, logprobs=1), 0, len(tokens), tokens, len(tokens))
        sampled = runner.run(StepPlan((SequenceStep(0, tokens, 0, range(8), ask),))).sampled[0]
        assert sampled.logprobs is not None
        found.append((sampled.token_id, sampled.logprobs.chosen.logprob))
    return found


def prompts() -> list[list[int]]:
    """As common.py there has them."""
    return torch.randint(0, 128, (4, 24), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_library_that_made_them(name: str, tmp_path: Path) -> None:
    case, expected = CASES[name], load_file(MADE / name / "expected.safetensors")
    found = loaded(MADE / name, tmp_path).weights
    for place, (weight, rows) in PLACES.items():
        wanted, packed = expected[f"model.layers.0.{place}.weight"], found[weight]
        assert isinstance(packed, PackedWeight)
        assert packed.kind == case.kind
        off = (packed.dequantized()[rows] - wanted).norm() / wanted.norm()
        assert float(off) <= case.values, place


@pytest.mark.parametrize("name", CASES)
def test_answers_are_near_those_of_the_library_that_made_it(name: str, tmp_path: Path) -> None:
    logits = load_file(MADE / name / "expected.safetensors")["logits"].log_softmax(-1)
    for row, (token, logprob) in zip(logits, answers(MADE / name, tmp_path), strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=CASES[name].answers)
        assert float(row.max() - row[token]) < CASES[name].answers
