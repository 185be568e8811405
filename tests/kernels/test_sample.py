"""The draw, against a loop over tokens and against the wanted frequencies."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.registry import kernels

K = kernels()


def drawn(
    logits: Tensor, u: float, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> int:
    rows = (torch.tensor([x]) for x in (temperature, top_k, top_p, min_p))
    return int(K.sample(logits[None], *rows, torch.tensor([u], dtype=torch.float64)))


def obvious(
    logits: Tensor, u: float, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> int:
    probs = torch.softmax(logits.double() / temperature, 0)
    ranked = sorted(range(len(probs)), key=lambda i: -float(probs[i]))
    kept = ranked[:top_k] if top_k else ranked
    mass, held, nucleus = sum(float(probs[i]) for i in kept), 0.0, []
    for i in kept:
        if nucleus and held >= top_p * mass:
            break
        nucleus.append(i)
        held += float(probs[i])
    kept = sorted(i for i in nucleus if probs[i] >= min_p * probs.max())
    target, reached = u * sum(float(probs[i]) for i in kept), 0.0
    for i in kept:
        reached += float(probs[i])
        if reached > target:
            return i
    return kept[-1]


def test_every_filter_agrees_with_the_obvious_loop() -> None:
    torch.manual_seed(1)
    settings = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.9, "min_p": 0.05}]
    for trial in range(60):
        logits, u = torch.randn(41) * 2, float(torch.rand(()))
        chosen = settings[trial % len(settings)] | {"temperature": 0.5 + trial / 40}
        assert drawn(logits, u, **chosen) == obvious(logits, u, **chosen)


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 20_000
    columns = torch.ones(n), torch.zeros(n, dtype=torch.int64), torch.ones(n), torch.zeros(n)
    uniform = (torch.arange(n) + 0.5).double() / n
    found = torch.bincount(K.sample(logits.expand(n, 4), *columns, uniform), minlength=4) / n
    torch.testing.assert_close(found, torch.softmax(logits, 0), atol=2e-4, rtol=0)


def test_rows_with_different_settings_do_not_touch_each_other() -> None:
    torch.manual_seed(2)
    logits, u = torch.randn(4, 30), torch.rand(4).double()
    columns = (
        torch.tensor([1.0, 0.3, 2.0, 1.0]),
        torch.tensor([0, 3, 0, 30]),
        torch.tensor([1.0, 1.0, 0.5, 0.9]),
        torch.tensor([0.0, 0.1, 0.0, 0.0]),
    )
    together = K.sample(logits, *columns, u)
    for row in range(4):
        alone = K.sample(logits[row : row + 1], *(c[row : row + 1] for c in columns), u[row : row + 1])
        assert alone[0] == together[row]


def test_the_last_number_below_one_still_names_a_token_with_mass() -> None:
    logits = torch.tensor([1.0, 1.0, -torch.inf])
    assert drawn(logits, 1 - 2**-53) == 1
    assert drawn(logits, 0.0) == 0


def test_a_nucleus_wider_than_the_first_candidates_is_found_too() -> None:
    torch.manual_seed(3)
    flat, peaked = torch.randn(1500) * 0.1, torch.randn(1500) * 4
    for u in (0.01, 0.5, 0.97):
        assert drawn(flat, u, top_p=0.9) == obvious(flat, u, top_p=0.9)
        both = K.sample(
            torch.stack((flat, peaked)),
            torch.ones(2),
            torch.zeros(2, dtype=torch.int64),
            torch.tensor([0.9, 0.8]),
            torch.zeros(2),
            torch.tensor([u, u], dtype=torch.float64),
        )
        assert both.tolist() == [drawn(flat, u, top_p=0.9), drawn(peaked, u, top_p=0.8)]
