"""Greedy float32 answers and logprobs, against Hugging Face transformers, at the runner's level.

One forward of transformers over prompt + answer gives the greedy choice at every position: if each one is the
token we chose, the answers are identical. One architecture is also held against ``generate`` itself.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner
from baton.kernels.abi import native
from baton.kernels.abi.native import I64, P
from baton.kernels.linear.packed_floats import pack_f32
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import expected, make, prompts, reference
from tests.conformance.drive import Driver
from tests.conformance.kinds import KINDS
from tests.thorough import first_now, later

TOKENS = 64
LIKE_ANOTHER = (  # whose ropes, norms and shapes are those of other kinds and of tests/engine/program/test_rope.py
    *("llama2", "llama_linear", "llama_dynamic", "mistral_full", "qwen3_bias", "qwen3_moe_norm"),
    *("deepseek_v2_lite", "phi3_long"),
)
STATEFUL = ("qwen3_next", "qwen3_5", "bamba")  # whose steps take longest, so that fewer prompts are asked
NEAR = 1e-4  # between two float32 log-probabilities of one token, in nats
GREEDY = Sampling(temperature=0.0, max_tokens=TOKENS, logprobs=3)
# Shapes on which transformers' own float32 is up to 1.5e-4 … 7e-4 from float64; found by random search.
ILL_CONDITIONED: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen2", 100, {"hidden_size": 240, "num_attention_heads": 6, "num_key_value_heads": 2}),
    (
        "llama3",
        1,
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "hidden_size": 320,
            "vocab_size": 1000,
            "intermediate_size": 384,
            "initializer_range": 0.4,
        },
    ),
    (
        "llama_linear",
        13,
        {
            "num_attention_heads": 12,
            "hidden_size": 384,
            "vocab_size": 1117,
            "num_hidden_layers": 1,
            "intermediate_size": 384,
            "initializer_range": 0.5,
        },
    ),
    (
        "mistral_full",
        28,
        {
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "hidden_size": 440,
            "head_dim": 80,
            "vocab_size": 512,
            "intermediate_size": 384,
            "initializer_range": 0.2,
        },
    ),
]


def torch_rounds_as_we_do() -> bool:
    """Returns whether a layer's output has the same bits, as with MKL on the CPUs whose order ``dense`` follows."""
    if native.library() is None:
        return False
    x, weight, out = torch.randn(8, 400), torch.randn(64, 400), torch.empty(8, 64)
    packed = pack_f32(weight)
    call = native.function("dense", P, P, I64, I64, P, P, I64)
    call(packed.address, x.data_ptr(), 400, 8, None, out.data_ptr(), 64)
    return torch.equal(out, F.linear(x, weight))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def checkpoint(home: Path, kind: str) -> Path:
    directory = home / kind
    return directory if directory.exists() else make(directory, kind, shards=3 if kind == "qwen3" else 1)


def runner(directory: Path) -> Runner:
    return load_runner(EngineConfig(str(directory), threads=1))


def rounding(exact_model: Any, wanted: torch.Tensor, prompt: list[int], answer: list[int]) -> float:
    """Returns the most that any token of ``wanted``, transformers' float32, is from its float64 on this CPU, in
    nats.

    Two sums that round in other places may be as far from each other as from float64, each to its own side.
    """
    return float((wanted - expected(exact_model, prompt, answer)).abs().max())


@pytest.mark.parametrize("kind", [later(kind) if kind in LIKE_ANOTHER else kind for kind in KINDS])
def test_answers_are_those_of_transformers(home: Path, kind: str) -> None:
    require_the_same_answers(checkpoint(home, kind), count=7 if kind in STATEFUL else 12)


@pytest.mark.parametrize("shape", first_now(ILL_CONDITIONED, 2, whole=True), ids=lambda shape: shape[0])
def test_answers_are_those_of_transformers_where_float32_itself_is_off(
    tmp_path: Path, shape: tuple[str, int, dict[str, Any]]
) -> None:
    """Both are 1e-4 and more from float64: only sums that round in the same places come closer to each other."""
    if not torch_rounds_as_we_do():
        pytest.skip("torch's matrix product rounds in other places on this CPU")
    kind, seed, changes = shape
    require_the_same_answers(make(tmp_path / kind, kind, seed=seed, **changes), count=8)


def require_the_same_answers(directory: Path, count: int) -> None:
    ours = runner(directory)
    asked = prompts(ours.spec.vocab_size, count)
    driver = Driver(ours, pages=420, chunk=97)
    answers, model = driver.answer(asked, GREEDY), reference(directory)
    exact_model = cache(lambda: reference(directory, torch.float64))  # few kinds need it
    varied = 0
    for key, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        wanted = expected(model, prompt, answer)
        assert answer == wanted.argmax(-1).tolist()
        farthest = 0.0
        for at, found in enumerate(driver.logprobs[key]):
            assert found.chosen.rank == 1
            assert found.top[0].token_id == answer[at]
            off = [abs(token.logprob - float(wanted[at, token.token_id])) for token in (found.chosen, *found.top)]
            farthest = max(farthest, *off)
        assert farthest < NEAR or farthest < 2 * rounding(exact_model(), wanted, prompt, answer)
        varied += len(set(answer)) > TOKENS // 4
    assert varied > len(asked) // 2, "answers that repeat one token test nothing"


def test_answers_are_those_of_generate(home: Path) -> None:
    ours = runner(checkpoint(home, "mistral"))
    asked = prompts(ours.spec.vocab_size, count=3)
    answers, model = Driver(ours, pages=200).answer(asked, GREEDY), reference(home / "mistral")
    for prompt, answer in zip(asked, answers, strict=True):
        ids = torch.tensor([prompt])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        assert found[0, len(prompt) :].tolist() == answer


def test_older_spelling_of_the_config_gives_the_same_answers(home: Path, tmp_path: Path) -> None:
    new = checkpoint(home, "llama3")
    for file in new.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((new / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = prompts(1003, count=4)
    answers = [Driver(runner(path), pages=60).answer(asked, GREEDY) for path in (new, tmp_path)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["qwen2_mixed", later("llama3"), later("mistral")])  # layers of both kinds first
def test_chunks_pages_and_company_do_not_change_tokens(home: Path, kind: str) -> None:
    ours = runner(checkpoint(home, kind))
    asked = prompts(ours.spec.vocab_size, count=8)
    together = Driver(ours, pages=200, chunk=1024, seed=1).answer(asked, GREEDY)
    for chunk in (16, 61):
        assert Driver(ours, pages=200, chunk=chunk, seed=chunk).answer(asked, GREEDY) == together
    alone = Driver(ours, pages=200, seed=5)
    assert [alone.answer([prompt], GREEDY)[0] for prompt in asked] == together


def test_a_replay_goes_on_as_if_nothing_had_happened(home: Path) -> None:
    ours = runner(checkpoint(home, "qwen3"))
    drawn = Sampling(temperature=0.9, seed=7, max_tokens=40)
    prompt = prompts(ours.spec.vocab_size)[5]
    driver = Driver(ours, pages=60)
    whole = driver.answer([prompt], drawn)[0]
    rest = Sampling(temperature=0.9, seed=7, max_tokens=25)
    assert driver.answer([prompt + whole[:15]], rest)[0] == whole[15:]
