"""Agreement along a reference's answers: zero beside itself, and the arithmetic of the divergence."""

from __future__ import annotations

import math

import numpy as np
import pytest

from baton.evaluate.local import LocalSubject
from baton.evaluate.paths import agreeing_tokens, divergence, greedy_answers, opening_prompts, path_figures
from baton.evaluate.subject import TokenKey


def likelihoods(p: np.ndarray, top: int) -> dict[TokenKey, float]:
    return {int(i): math.log(p[i]) for i in np.argsort(-p)[:top]}


def test_a_model_beside_itself_agrees_everywhere(local: LocalSubject) -> None:
    paths = greedy_answers(local, [tuple(local.encode(text)) for text in ("a river", "the moon is")], 8)
    found = {figure.name: figure.value for figure in path_figures(local, local, paths)}
    assert found["KL"] == pytest.approx(0, abs=1e-9)
    assert found["another likeliest token"] == found["answers that change"] == 0
    assert found["tokens before the first that differs"] == 8


def test_a_rounded_model_departs_from_the_reference(local: LocalSubject, rounded: LocalSubject) -> None:
    paths = greedy_answers(local, [tuple(local.encode("a river"))], 12)
    found = {figure.name: figure for figure in path_figures(rounded, local, paths)}
    assert found["KL"].value > 0
    assert found["KL"].judged == "kl"
    assert found["answers that change"].count == 1


def test_the_divergence_over_every_token_is_the_whole_vocabularys() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(30)), rng.dirichlet(np.ones(30))
    exact = float((p * np.log(p / q)).sum())
    assert divergence(likelihoods(p, 30), likelihoods(q, 30)) == pytest.approx(exact)


def test_the_divergence_over_some_tokens_is_never_above_it() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        p, q = rng.dirichlet(np.full(30, 0.3)) + 1e-9, rng.dirichlet(np.full(30, 0.3)) + 1e-9
        p, q = p / p.sum(), q / q.sum()
        exact = float((p * np.log(p / q)).sum())
        assert 0 <= divergence(likelihoods(p, 7), likelihoods(q, 7)) <= exact + 1e-9


def test_agreement_ends_at_the_first_difference() -> None:
    assert agreeing_tokens([1, 2, 3], [1, 2, 4]) == 2
    assert agreeing_tokens([1, 2, 3], [1, 2]) == 2


def test_openings_are_spread_over_the_text() -> None:
    documents = [[i] * 9 for i in range(100)]
    assert opening_prompts(documents, 4, 3) == [(0,) * 3, (25,) * 3, (50,) * 3, (75,) * 3]
