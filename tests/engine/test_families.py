"""Families beyond Llama's plain decoder: every op against its reference, a row's bits, rounding on load, MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.engine.backends.cuda.load import lacking
from baton.engine.checkpoints.weights import load_weights
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.config import ModelConfig
from baton.kernels.abi import native
from baton.kernels.linear.packed import CODES, PackedWeight, one_of
from baton.protos.errors import CheckpointError
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make, prompts
from tests.conformance.drive import Driver
from tests.conformance.kinds import KINDS
from tests.engine.small_models import load, model, require_the_references_tokens, require_the_same_bits
from tests.thorough import first_now

GREEDY = Sampling(temperature=0.0, max_tokens=5, logprobs=1)
FAMILIES = ("gemma2", "gpt_oss", "gemma3", "olmo2", "phi3")
needs_native = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def asked(vocab: int) -> list[list[int]]:
    """A few prompts, one of them longer than any window."""
    return [prompt[:71] for prompt in prompts(vocab, count=6, seed=5)[3:]]


@needs_native
@pytest.mark.parametrize(
    "fields",
    first_now(
        [
            {"quantization": "int4", "kv_cache_dtype": "int8"},
            {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
            {"quantization": "int8"},
            {},
        ]
    ),
    ids=str,
)
@pytest.mark.parametrize("kind", first_now(FAMILIES, 3))
def test_an_answer_has_the_same_bits_alone_batched_and_op_by_op(
    home: Path, kind: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model(home, kind)
    mine = asked(program_for(ModelConfig.read(directory)).vocab_size)
    require_the_same_bits(lambda: load(directory, home, **fields), mine, GREEDY, (32, 23), monkeypatch)


@needs_native
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_reference_gives_the_same_tokens(home: Path, kind: str) -> None:
    directory = model(home, kind)
    found = load(directory, home)
    require_the_references_tokens(directory, found, asked(found.spec.vocab_size), GREEDY)


@needs_native
@pytest.mark.parametrize("kind", FAMILIES)
def test_blocks_that_another_prompt_computed_answer_as_ones_own(home: Path, kind: str) -> None:
    runner = load(model(home, kind), home)
    prompt, spec = asked(runner.spec.vocab_size)[-1], runner.spec.layout
    runner.bind(memoryview(buffer := bytearray(12 * spec.page_bytes)), 12)
    sample = SampleSpec(GREEDY, 0, len(prompt), prompt, len(prompt))
    [whole] = runner.run(StepPlan((SequenceStep(0, prompt, 0, [7, 2, 9, 4, 0], sample),))).sampled
    runner.run(StepPlan((SequenceStep(1, prompt[:48] + [5] * 9, 0, [3, 8, 1, 6]),)))  # shares three blocks
    hit = SequenceStep(2, prompt[48:], 48, [3, 8, 1, 10, 11], sample)
    [found] = runner.run(StepPlan((hit,))).sampled
    assert (found.token_id, found.logprobs) == (whole.token_id, whole.logprobs)
    assert buffer.count(0) < len(buffer)


def test_norms_that_start_from_one_are_float32_beside_bfloat16(home: Path) -> None:
    directory = model(home, "gemma2")
    stored = load_file(directory / "model.safetensors")["model.norm.weight"]
    config, read = EngineConfig(str(directory), dtype="bfloat16", cache_dir=str(home)), ModelConfig.read(directory)
    for quantization in ("none", "int8"):
        of = msgspec.structs.replace(config, quantization=quantization)
        weights = load_weights(of, directory, read, program_for(read), torch.bfloat16).weights
        assert torch.equal(weights["norm"], stored.float() + 1.0)
        assert weights["embed"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_gpus_own_kernels_are_refused_in_words(home: Path, kind: str) -> None:
    words = {
        "gemma2": "GELU gates, capped attention scores, capped logits, scaled embeddings",
        "gemma3": "GELU gates, scaled embeddings, several ropes or partly rotated heads",
        "gpt_oss": "attention sinks, experts with biases",
        "olmo2": "norms over all heads of q or k, residuals without a norm",
        "phi3": "several ropes or partly rotated heads",
    }
    program = program_for(ModelConfig.read(model(home, kind)))
    assert lacking(program, "bfloat16") == (
        f"this architecture needs {words[kind]}, which no CUDA kernel computes yet"
    )


def test_longrope_beyond_the_original_context_is_another_fidelity(home: Path) -> None:
    directory = model(home, "phi3_long")
    short, same, long = (
        load_runner(EngineConfig(str(directory), threads=1, max_model_len=most)).spec for most in (None, 1000, 1024)
    )
    assert (short.max_model_len, long.max_model_len) == (1000, 1024)
    assert same.layout == short.layout
    assert long.layout.fidelity == short.layout.fidelity + "+long"


def coded(home: Path, tmp_path: Path) -> Path:
    """gpt-oss with random MXFP4 experts, as its own checkpoints have them."""
    source = make(home / "wide", "gpt_oss", intermediate_size=64) if not (home / "wide").exists() else home / "wide"
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(119, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return tmp_path


def test_mxfp4_experts_hold_the_values_that_transformers_reads(home: Path, tmp_path: Path) -> None:
    directory = coded(home, tmp_path)
    tensors, read = load_file(directory / "model.safetensors"), ModelConfig.read(directory)
    config = EngineConfig(str(directory), cache_dir=str(tmp_path))
    weights = load_weights(config, directory, read, program_for(read), torch.float32).weights
    at = "model.layers.1.mlp.experts"
    for ours, theirs in (("1.experts_gate_up", "gate_up_proj"), ("1.experts_down", "down_proj")):
        packed = weights[ours]
        assert isinstance(packed, PackedWeight)
        assert packed.kind == CODES
        blocks, scales = (tensors[f"{at}.{theirs}_{end}"] for end in ("blocks", "scales"))
        every = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        for expert, wanted in enumerate(every.transpose(1, 2)):
            if theirs == "gate_up_proj":
                wanted = torch.cat((wanted[0::2], wanted[1::2]))
            assert torch.equal(one_of(packed, expert, len(every), len(wanted)).dequantized(), wanted)
    biases = tensors[f"{at}.gate_up_proj_bias"]
    halves = torch.stack((biases[:, 0::2], biases[:, 1::2]), 1).flatten()
    assert torch.equal(weights["1.experts_gate_up_bias"], halves)


@needs_native
def test_answers_from_mxfp4_experts_are_the_references(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CHECK_STEP", "1")
    runner = load(coded(home, tmp_path), tmp_path)
    answers = Driver(runner, pages=30, chunk=32).answer(asked(1013), GREEDY)
    assert len({token for answer in answers for token in answer}) > 5


@pytest.mark.parametrize(
    ("end", "spoilt", "said"),
    [
        ("blocks", lambda t: t[:, :-2].contiguous(), "blocks is packed for .94, 64.*config.json asks for"),
        ("blocks", lambda t: t.float(), "blocks is torch.float32"),
        ("scales", lambda t: torch.full_like(t, 255), "scales holds NaN"),
        ("scales", lambda t: t[:3].contiguous(), "scales is torch.uint8"),
    ],
    ids=["shape", "dtype", "nan", "experts"],
)
def test_damaged_mxfp4_is_refused_by_name(home: Path, tmp_path: Path, end: str, spoilt: Any, said: str) -> None:
    directory = coded(home, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    name = f"model.layers.0.mlp.experts.{'gate_up' if end == 'scales' else 'down'}_proj_{end}"
    tensors[name] = spoilt(tensors[name])
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        load_runner(EngineConfig(str(directory), threads=1, cache_dir=str(tmp_path)))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_model_inside_one_that_sees_images_answers_as_it_does_alone(
    home: Path, tmp_path: Path, prefix: str
) -> None:
    alone = model(home, "gemma3")
    tensors = load_file(alone / "model.safetensors")
    inside = {f"{prefix}{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
    save_file(inside | {"model.vision_tower.x": torch.zeros(3)}, tmp_path / "model.safetensors")
    config = {"model_type": "gemma3", "text_config": json.loads((alone / "config.json").read_text())}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mine = asked(777)
    answers = [
        Driver(load_runner(EngineConfig(str(at), threads=1)), pages=30).answer(mine, GREEDY)
        for at in (alone, tmp_path)
    ]
    assert answers[0] == answers[1]


def test_a_gguf_file_of_a_family_whose_values_gguf_changes_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model(home, "gemma2") / "config.json").read_bytes())
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"model_type is 'gemma2'; of GGUF files llama, .* use safetensors"):
        load_runner(EngineConfig(str(tmp_path), threads=1))


def test_every_new_kind_is_one_of_the_conformance_suite() -> None:
    assert set(FAMILIES) <= set(KINDS)
