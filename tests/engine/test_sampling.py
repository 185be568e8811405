"""Edits to logits, likelihoods and the keyed randomness, one obvious formula each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from baton.engine.plan import SampledToken, SampleSpec
from baton.engine.sampling import choose, uniform
from baton.kernels.registry import kernels
from baton.protos.errors import BatonError
from baton.protos.nouns import Sampling

DRAW = kernels().sample


def spec(
    history: list[int] | None = None, prompt: int = 0, banned: tuple[int, ...] = (), **fields: Any
) -> SampleSpec:
    history = [0] if history is None else history
    return SampleSpec(Sampling(**({"temperature": 0.0} | fields)), 0, len(history), history, prompt, banned)


def pick(logits: list[float], wanted: SampleSpec) -> SampledToken:
    return choose(torch.tensor([logits]), [5], [wanted], DRAW)[0]


def test_greedy_takes_the_likeliest() -> None:
    assert pick([0.0, 3.0, 1.0], spec()) == SampledToken(5, 1)
    assert pick([0.0, 3.0, 1.0], spec(temperature=1e-30)) == SampledToken(5, 1)


def test_banned_ids_are_never_chosen() -> None:
    assert pick([0.0, 3.0, 1.0], spec(banned=(1, 999))).token_id == 2
    assert pick([0.0, 3.0, 1.0], spec(banned=(1, 2), temperature=2.0)).token_id == 0


def test_logit_bias_is_added() -> None:
    assert pick([0.0, 3.0, 1.0], spec(logit_bias={0: 3.5})).token_id == 0
    assert pick([0.0, 3.0, 1.0], spec(logit_bias={1: -100.0})).token_id == 2


def test_repetition_penalty_covers_the_prompt_and_pushes_down_either_sign() -> None:
    assert pick([2.5, 3.0], spec(history=[1], prompt=1, repetition_penalty=1.5)).token_id == 0
    assert pick([-1.2, -1.0], spec(history=[1], prompt=1, repetition_penalty=1.5)).token_id == 0


def test_presence_and_frequency_count_outputs_only() -> None:
    assert pick([2.0, 3.0], spec(history=[1, 1], prompt=2, presence_penalty=2.0)).token_id == 1
    assert pick([2.0, 3.0], spec(history=[0, 1], prompt=1, presence_penalty=1.5)).token_id == 0
    assert pick([2.0, 3.0], spec(history=[1, 1, 1], prompt=0, frequency_penalty=0.3)).token_id == 1
    assert pick([2.0, 3.0], spec(history=[1, 1, 1, 1], prompt=0, frequency_penalty=0.3)).token_id == 0


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = [1.0, 2.0, 0.0, -1.0]
    found = pick(logits, spec(logit_bias={2: 50.0}, temperature=0.7, logprobs=2)).logprobs
    total = math.log(sum(math.exp(x) for x in logits))
    assert found is not None
    assert (found.chosen.token_id, found.chosen.rank) == (2, 3)
    assert found.chosen.logprob == pytest.approx(0.0 - total, abs=1e-6)
    assert [(t.token_id, t.rank) for t in found.top] == [(1, 1), (0, 2)]
    assert found.top[0].logprob == pytest.approx(2.0 - total, abs=1e-6)


def test_zero_logprobs_gives_the_chosen_one_alone_and_more_than_the_vocabulary_gives_all() -> None:
    none, every = pick([0.0, 1.0], spec(logprobs=0)).logprobs, pick([0.0, 1.0], spec(logprobs=20)).logprobs
    assert none is not None
    assert every is not None
    assert (len(none.top), len(every.top)) == (0, 2)


def test_each_row_of_a_mixed_batch_is_what_it_is_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    specs = [
        spec(),
        spec(temperature=1.0, seed=4),
        spec(temperature=0.5, seed=4, top_k=3, logprobs=1),
        spec(history=[1, 2, 2], prompt=1, temperature=1.0, frequency_penalty=1.0, logprobs=4),
        spec(banned=(7,), logprobs=0),
        spec(temperature=1.0, top_p=0.5, min_p=0.1, seed=2**63 + 1),
    ]
    kept = logits.clone()
    together = choose(logits, list(range(6)), specs, DRAW)
    assert torch.equal(logits, kept)
    for row, wanted in enumerate(specs):
        alone = choose(logits[row : row + 1], [row], [wanted], DRAW)[0]
        assert (alone.token_id, alone.seq) == (together[row].token_id, row)
        assert (alone.logprobs is None) == (together[row].logprobs is None)


def test_randomness_is_keyed_by_seed_choice_and_position_and_never_changes() -> None:
    assert uniform(0, 0, 0) == 0.45407064605822545
    keys = [(seed, choice, position) for seed in (1, 2) for choice in (0, 1) for position in (5, 6)]
    assert len({uniform(*key) for key in keys}) == len(keys)
    mean = sum(uniform(3, 0, position) for position in range(4000)) / 4000
    assert mean == pytest.approx(0.5, abs=0.02)


def test_logits_without_a_finite_value_fail_and_name_the_sequence() -> None:
    with pytest.raises(BatonError, match=r"\[8\]"):
        choose(torch.tensor([[0.0, 1.0], [math.nan, 0.0]]), [7, 8], [spec(), spec()], DRAW)
