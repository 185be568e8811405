"""Checkpoints that the original libraries made (tests/data/quantized): their values, and the answers from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.checkpoints.weights import LoadedWeights, load_weights
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.config import ModelConfig
from baton.engine.quant.gguf import EXPERT, GgufCheckpoint, gguf_name
from baton.kernels.linear.integers import values_of
from baton.kernels.linear.packed import CODES, E4M3_A16, W4, W4_ORDERED, W8, W8_OUTLIERS, PackedWeight
from baton.protos.nouns import Sampling

MADE = Path(__file__).parents[2] / "data" / "quantized"
PLACES = {"self_attn.q_proj": "0.qkv", "mlp.down_proj": "0.down"}  # the first rows of these weights


class Case(NamedTuple):
    """The kind of its weights; how far their values may be off (as a share), and log-probabilities."""

    kind: int
    values: float
    answers: float


HALF = 6e-4  # of scales that become float16
VALUES_IN_BF16 = 3e-3  # torchao rounds the products of its scales to the model's bfloat16
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
    "torchao_int8": Case(W8, VALUES_IN_BF16, 0.15),
    "torchao_w8a8": Case(W8, VALUES_IN_BF16, 0.15),
    "torchao_fp8": Case(E4M3_A16, VALUES_IN_BF16, 0.15),
    "gptqmodel_w4": Case(W4_ORDERED, HALF, 0.1),
    "gptqmodel_w3": Case(W4, HALF, 0.1),
    "gptqmodel_awq": Case(W4, HALF, 0.1),
    "autoawq": Case(W4, HALF, 0.1),
}

GGUF_KINDS = {"gguf_k_quants": 9, "gguf_experts": 5}  # how many kinds of blocks each file has


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
    """Returns the prompts of tests/data/quantized/common.py."""
    return torch.randint(0, 128, (4, 24), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_library_that_made_them(name: str, tmp_path: Path) -> None:
    case, expected = CASES[name], load_file(MADE / name / "expected.safetensors")
    found = loaded(MADE / name, tmp_path).weights
    for place, weight in PLACES.items():
        wanted, packed = expected[f"model.layers.0.{place}.weight"], found[weight]
        assert isinstance(packed, PackedWeight)
        assert packed.kind == case.kind
        off = (packed.dequantized()[: len(wanted)] - wanted).norm() / wanted.norm()
        assert float(off) <= case.values, place


@pytest.mark.parametrize("name", CASES)
def test_answers_are_near_those_of_the_library_that_made_it(name: str, tmp_path: Path) -> None:
    logits = load_file(MADE / name / "expected.safetensors")["logits"].log_softmax(-1)
    for row, (token, logprob) in zip(logits, answers(MADE / name, tmp_path), strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=CASES[name].answers)
        assert float(row.max() - row[token]) < CASES[name].answers


@pytest.mark.parametrize("name", GGUF_KINDS)
def test_a_gguf_by_ggmls_quantizers_holds_what_the_gguf_package_reads(name: str) -> None:
    """Every tensor but q and k, whose rows are put into another order."""
    path, seen = MADE / name / "model.gguf", set()
    config = ModelConfig.read(MADE / name)
    found, held = GgufCheckpoint(path, config), {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for weight in program_for(config).weights:
        for source, shape in zip(weight.sources, weight.shapes, strict=True):
            tensor, expert = held[gguf_name(source)], EXPERT.search(source)
            wanted = torch.from_numpy(gguf.dequantize(tensor.data.copy(), tensor.tensor_type).copy())
            wanted = wanted if expert is None else wanted[int(expert[1])]
            value = found.read(source, shape)
            assert value is not None
            got = values_of(value).float()
            if source.endswith(("q_proj.weight", "k_proj.weight")):
                got, wanted = got.sort(0).values, wanted.sort(0).values
            assert float((got - wanted).norm() / wanted.norm()) <= HALF, source
            seen.add(tensor.tensor_type.name)
    assert len(seen - {"F32"}) == GGUF_KINDS[name]


@pytest.mark.parametrize("name", GGUF_KINDS)
def test_a_gguf_answers_as_its_values_in_float_do(name: str, tmp_path: Path) -> None:
    config = ModelConfig.read(MADE / name)
    found, values = GgufCheckpoint(MADE / name / "model.gguf", config), {}
    for weight in program_for(config).weights:
        for source, shape in zip(weight.sources, weight.shapes, strict=True):
            part = found.read(source, shape)
            assert part is not None
            values[source] = values_of(part).float().contiguous()
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(MADE / name / "config.json", plain)
    save_file(values, plain / "model.safetensors")
    for (_, logprob), (_, wanted) in zip(answers(MADE / name, tmp_path), answers(plain, tmp_path), strict=True):
        assert logprob == pytest.approx(wanted, abs=0.1)
