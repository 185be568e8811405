"""Tests what a prompt itself gives, its logprobs and its pooled hidden state, against Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from baton.engine.backends.torch.runner import TorchRunner
from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.plan import Runner
from baton.engine.program.config import ModelConfig
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import BASE, make, prompts, quiet, reference
from tests.conformance.drive import Driver


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("prompt") / "llama3", "llama3")


def runners(home: Path) -> dict[str, Runner]:
    """The runner that serves here, and the oracle that runs op by op."""
    served = load_runner(EngineConfig(str(home), threads=1))
    program = program_for(ModelConfig.read(home))
    weights = Checkpoint(home).weights(program.weights, torch.float32, "cpu")
    return {"served": served, "oracle": TorchRunner(served.spec, program, weights)}


@pytest.mark.parametrize("which", ["served", "oracle"])
def test_likelihoods_of_named_tokens_are_those_of_transformers(home: Path, which: str) -> None:
    ours, model = runners(home)[which], reference(home)
    asked, named = prompts(ours.spec.vocab_size, count=6), (700, 3)
    driver = Driver(ours, pages=300, chunk=97)
    driver.answer(asked, Sampling(temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=named))
    for key, prompt in enumerate(asked):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        top = driver.logprobs[key][0].top
        assert [each.token_id for each in top] == list(named)
        assert [each.logprob for each in top] == pytest.approx(wanted[list(named)].tolist(), abs=1e-4)
        assert [each.rank for each in top] == [int((wanted > wanted[token]).sum()) + 1 for token in named]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_checkpoint_without_a_head_gives_the_states_of_transformers(tmp_path: Path, quantization: str) -> None:
    quiet()
    fields = BASE | {"num_key_value_heads": 2, "head_dim": 24, "vocab_size": 501, "initializer_range": 0.1}
    whole = transformers.AutoModel.from_config(transformers.AutoConfig.for_model("qwen3", **fields)).eval()
    whole.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    config = EngineConfig(str(tmp_path), threads=1, quantization=quantization, cache_dir=str(tmp_path))
    asked, driver = prompts(501, count=5), Driver(load_runner(config), pages=100, chunk=97)
    driver.answer(asked, Sampling(temperature=0.0, max_tokens=1, pooling="last"))
    for key, prompt in enumerate(asked):
        with torch.inference_mode():
            wanted = whole(torch.tensor([prompt])).last_hidden_state[0, -1]
        found = torch.frombuffer(bytearray(driver.read[key][1]), dtype=torch.float32)
        likeness = float(torch.cosine_similarity(found, wanted, 0))
        assert likeness > (0.98 if quantization == "int8" else 1 - 1e-6)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("which", ["served", "oracle"])
def test_logprobs_and_pooled_states_of_prompts_are_those_of_transformers(
    home: Path, which: str, pooling: str
) -> None:
    ours, model = runners(home)[which], reference(home)
    asked = prompts(ours.spec.vocab_size, count=9)
    driver = Driver(ours, pages=300, chunk=97)
    driver.answer(asked, Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=2, pooling=pooling))
    for key, prompt in enumerate(asked):
        with torch.inference_mode():
            found = model(torch.tensor([prompt]), output_hidden_states=True)
        states, logprobs = found.hidden_states[-1][0], found.logits[0].log_softmax(-1)
        scores, pooled = driver.read[key]
        wanted = states.mean(0) if pooling == "mean" else states[-1]
        assert np.frombuffer(pooled, "<f4") == pytest.approx(wanted.numpy(), abs=1e-4)
        assert [score.chosen.token_id for score in scores] == prompt[1:]
        own = logprobs[:-1].gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
        assert [score.chosen.logprob for score in scores] == pytest.approx(own.tolist(), abs=1e-4)
        assert all(len(score.top) == 2 and score.top[0].rank == 1 for score in scores)
