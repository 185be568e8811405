"""Edits to logits, likelihoods and the keyed randomness, one obvious formula each."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from baton.engine.plan import DraftedToken, SampledToken, SampleSpec
from baton.engine.sampling import choose, spread_of, uniform
from baton.kernels.registry import kernels
from baton.protos.errors import BatonError
from baton.protos.nouns import Sampling
from tests.thorough import first_now

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


P = torch.tensor([0.3, 0.02, 0.25, 0.1, 0.05, 0.18, 0.04, 0.06])
Q = torch.tensor([0.1, 0.3, 0.2, 0.05, 0.2, 0.05, 0.05, 0.05])


def judged_by_rejection(count: int, spread: bool, **sampling) -> tuple[list[int], int]:
    """Tokens by seed, of drafts drawn by Q; and how many drafts stood."""
    drafts = torch.multinomial(Q, count, replacement=True, generator=torch.Generator().manual_seed(5)).tolist()
    specs = [
        msgspec.structs.replace(
            spec(seed=seed, **sampling), drafted=DraftedToken(token, Q.numpy() if spread else None)
        )
        for seed, token in enumerate(drafts)
    ]
    found = choose(P.log().expand(count, -1), range(count), specs, kernels().sample)
    tokens = [one.token_id for one in found]
    return tokens, sum(token == draft for token, draft in zip(tokens, drafts, strict=True))


@pytest.mark.parametrize(
    ("spread", "sampling"),
    first_now(
        [
            (True, {"temperature": 0.7, "top_k": 5}),
            (False, {"temperature": 1.0}),
            (True, {"temperature": 1.0}),
            (False, {"temperature": 0.7, "top_k": 5}),
        ],
        2,
    ),
    ids=str,
)
def test_tokens_judged_by_rejection_have_the_targets_distribution(spread: bool, sampling: dict) -> None:
    count = 2000
    tokens, stood = judged_by_rejection(count, spread, **sampling)
    wanted = spread_of(P.log(), spec(**sampling))
    seen = torch.bincount(torch.tensor(tokens), minlength=len(P)).double()
    assert not seen[wanted == 0].any()
    kept = wanted > 0
    chi_square = float((((seen - count * wanted) ** 2) / (count * wanted))[kept].sum())
    assert chi_square < 24.3  # 7 degrees of freedom, one in a thousand
    share = float(torch.minimum(wanted, Q).sum()) if spread else float((wanted * Q).sum())
    assert stood / count == pytest.approx(share, abs=0.035)


def test_a_greedy_draft_stands_by_being_the_likeliest_and_likelihoods_are_of_what_was_chosen() -> None:
    asked = msgspec.structs.replace(spec(temperature=0.0, logprobs=0), drafted=DraftedToken(3))
    (found,) = choose(P.log()[None], [1], [asked], kernels().sample)
    assert found.token_id == 0
    drawn = msgspec.structs.replace(spec(temperature=1.0, seed=9, logprobs=0), drafted=DraftedToken(2, Q.numpy()))
    (one,) = choose(P.log()[None], [1], [drawn], kernels().sample)
    assert one.logprobs.chosen.token_id == one.token_id
    assert one.logprobs.chosen.logprob == pytest.approx(float(P[one.token_id].log()), abs=1e-5)


def test_the_probabilities_of_a_draw_are_told_where_they_are_asked_for() -> None:
    asked = msgspec.structs.replace(spec(temperature=0.5, top_p=0.8), spread=True)
    (found,) = choose(P.log()[None], [1], [asked], kernels().sample)
    assert found.spread.sum() == pytest.approx(1.0)
    assert found.spread[1] == 0.0
