"""Families as small as they come, against transformers: tokens and likelihoods, the same bits in any chunks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import expected, make, prompts, reference
from tests.conformance.drive import Driver
from tests.conformance.small_kinds import SMALL
from tests.conformance.test_parity import NEAR, rounding
from tests.engine.small_models import require_the_references_tokens
from tests.thorough import first_now

WITH_NEW_OPS = ("llama4", "cohere2", "nemotron_h")  # each other op of theirs is another kind's as well
GREEDY = Sampling(temperature=0.0, max_tokens=16, logprobs=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small")


def checkpoint(home: Path, kind: str) -> Path:
    return home / kind if (home / kind).exists() else make(home / kind, kind)


def asked(vocab: int) -> list[list[int]]:
    return [prompt[:75] for prompt in prompts(vocab, 9)[1:]]


@pytest.mark.parametrize("kind", SMALL)
def test_answers_are_those_of_transformers_and_have_the_same_bits_in_chunks(home: Path, kind: str) -> None:
    directory = checkpoint(home, kind)
    ours, model = load_runner(EngineConfig(str(directory), threads=1)), reference(directory)
    mine = asked(ours.spec.vocab_size)[: 4 if ours.spec.layout.states else 8]
    driver, again = Driver(ours, pages=120, chunk=97), Driver(ours, pages=120, chunk=32, seed=3)
    answers = driver.answer(mine, GREEDY)
    exact_model = cache(lambda: reference(directory, torch.float64))  # few kinds need it
    varied = 0
    for key, (prompt, answer) in enumerate(zip(mine, answers, strict=True)):
        wanted = expected(model, prompt, answer)
        assert answer == wanted.argmax(-1).tolist()
        for at, found in enumerate(driver.logprobs[key]):
            off = max(abs(one.logprob - float(wanted[at, one.token_id])) for one in found.top)
            assert off < NEAR or off < 2 * rounding(exact_model(), wanted, prompt, answer)
        varied += len(set(answer)) > len(answer) // 4
    assert varied > len(mine) // 2, "answers that repeat one token test nothing"
    assert again.answer(mine, GREEDY) == answers
    assert again.logprobs == driver.logprobs


@pytest.mark.parametrize(
    "kind", first_now(sorted(SMALL, key=lambda kind: kind not in WITH_NEW_OPS), len(WITH_NEW_OPS))
)
def test_the_reference_gives_the_same_tokens(home: Path, kind: str) -> None:
    directory = checkpoint(home, kind)
    ours = load_runner(EngineConfig(str(directory), threads=1))
    require_the_references_tokens(directory, ours, asked(ours.spec.vocab_size)[:4], GREEDY)
