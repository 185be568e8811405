"""float16 as the dtype of weights, computation and KV: answers, what is stored, where it isn't known."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.backends.torch.runner import TorchRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.kernels.abi import native
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make, prompts, reference

KINDS = ("qwen2", "mixtral")  # a tied table with biases; experts
TOP = Sampling(temperature=0.0, max_tokens=1, logprobs=8)


@pytest.fixture(scope="module", params=KINDS)
def halves(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tensors are float16."""
    directory = make(tmp_path_factory.mktemp("halves"), request.param)
    path = directory / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return directory


def likely(directory: Path, **settings: Any) -> dict[int, float]:
    """The likeliest tokens behind a prompt, and their log-probabilities."""
    runner = load_runner(EngineConfig(str(directory), threads=1, **settings))
    prompt = prompts(runner.spec.vocab_size)[3][:60]
    runner.bind(memoryview(bytearray(8 * runner.spec.layout.page_bytes)), 8)
    ask = SampleSpec(TOP, 0, len(prompt), prompt, len(prompt))
    found = runner.run(StepPlan((SequenceStep(0, prompt, 0, range(8), ask),))).sampled[0].logprobs
    assert found is not None
    return {top.token_id: top.logprob for top in found.top}


def test_a_float16_checkpoint_computed_in_float16_answers_as_in_transformers(
    halves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CHECK_STEP", "1")  # each op beside its reference
    model = reference(halves)
    prompt = prompts(model.config.vocab_size)[3][:60]
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    for kv, near in (("auto", 0.02), ("float32", 5e-5)):  # weights stay what they are, and sums are float32
        for token, logprob in likely(halves, dtype="float16", kv_cache_dtype=kv).items():
            assert logprob == pytest.approx(float(wanted[token]), abs=near)


def test_kv_is_float16_too_and_may_be_beside_another_dtype(halves: Path) -> None:
    def fidelity(**settings: Any) -> str:
        return load_runner(EngineConfig(str(halves), **settings)).spec.layout.fidelity

    assert fidelity(dtype="float16") == "float16"
    assert fidelity(dtype="float16", kv_cache_dtype="int8") == "float16+int8"
    assert fidelity(kv_cache_dtype="fp16") == "float32+float16"
    exact, rounded = likely(halves), likely(halves, kv_cache_dtype="fp16")
    assert rounded == pytest.approx(exact, abs=0.02)
    assert rounded != exact


def test_without_a_compiler_torch_computes_it(halves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = likely(halves, dtype="float16")
    monkeypatch.setattr(native, "library", cache(lambda: None))
    assert isinstance(load_runner(EngineConfig(str(halves), dtype="float16")), TorchRunner)
    assert likely(halves, dtype="float16") == pytest.approx(known, abs=0.05)


def test_weights_rounded_on_load_take_float16_for_the_rest(halves: Path, tmp_path: Path) -> None:
    settings = {"quantization": "int8", "cache_dir": str(tmp_path)}
    found, known = (likely(halves, dtype=dtype, **settings) for dtype in ("float16", "float32"))
    best = max(known, key=lambda token: known[token])
    assert found[best] == pytest.approx(known[best], abs=0.3)


@pytest.mark.parametrize("settings", [{"dtype": "float16"}, {"kv_cache_dtype": "fp16"}], ids=str)
def test_a_gpu_refuses_it_by_the_setting(halves: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="float16 is computed on the cpu only, device is cuda") as refused:
        load_runner(EngineConfig(str(halves), device="cuda", **settings))
    assert refused.value.param == next(iter(settings))
