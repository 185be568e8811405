"""The native head on a CPU: float64 logits, the reference's tokens, chi-square over 100,000 draws."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.kernels import head_suite as suite
from tests.kernels.conftest import needs_native
from tests.kernels.linear_suite import exact, in_any_order, random_integers
from tests.kernels.mutants import is_caught, mutant
from tests.thorough import first_now

pytestmark = needs_native


def test_inputs_in_another_order_are_those_of_every_stretch_of_the_vocabulary(library: ctypes.CDLL) -> None:
    weight, x = in_any_order(random_integers(torch.randn(2304, 96), 4, 32)), torch.randn(3, 96)
    found, wanted = suite.logits_of(library, weight, x), exact(x, weight)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("form", suite.FORMS)
def test_logits_are_those_of_float64(library: ctypes.CDLL, form: str) -> None:
    suite.logits_are_the_oracles(library, form)


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 777, 3001])
def test_tokens_are_those_of_the_reference_with_the_same_seed(library: ctypes.CDLL, vocab: int) -> None:
    suite.tokens_are_the_references(library, vocab)


@pytest.mark.parametrize("form", suite.FORMS)
def test_a_rows_choice_is_the_same_alone_whatever_the_weights(library: ctypes.CDLL, form: str) -> None:
    suite.a_rows_choice_is_its_own(library, form)


def test_capped_logits_choose_as_the_reference_does(library: ctypes.CDLL) -> None:
    suite.capped_logits_choose(library)


@pytest.mark.parametrize("fields", first_now([{"top_p": 0.8}, {}, {"top_k": 20}, {"min_p": 0.1}]), ids=str)
def test_frequencies_follow_the_softmax(library: ctypes.CDLL, fields: dict[str, Any]) -> None:
    suite.frequencies_follow_the_softmax(library, fields, 100_000, 1000)


@pytest.mark.parametrize("check", suite.QUICK, ids=lambda check: check.__name__)
def test_what_else_holds_of_a_head(library: ctypes.CDLL, check: suite.Check) -> None:
    check(library)


@pytest.mark.parametrize("bug", first_now(["TIES", "MASS", "NUCLEUS", "COUNTS", "CAP"], 0))
def test_a_planted_bug_is_caught(bug: str) -> None:
    planted = mutant(f"LM_HEAD_{bug}", ("lm_head", "dense", "linear", "lora"))
    drawn = (lambda library: suite.tokens_are_the_references(library, 777), suite.capped_logits_choose)
    assert is_caught(planted, [*suite.QUICK, *drawn])
