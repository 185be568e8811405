"""speculative_accept on a CPU: the float64 reference, chi-square over many sequences, planted bugs."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from baton.kernels.registry import implementation
from tests.kernels import accept_suite as suite
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant
from tests.thorough import first_now

pytestmark = needs_native
VOCABS = (2, 15, 17, 1000, 4099)


def test_it_is_what_the_reference_says(library: ctypes.CDLL) -> None:
    suite.it_is_the_references(library, VOCABS, 72)


@pytest.mark.parametrize("check", suite.QUICK, ids=lambda check: check.__name__)
def test_what_else_holds_of_it(library: ctypes.CDLL, check: suite.Check) -> None:
    check(library)


@pytest.mark.parametrize(("certain", "count"), first_now([(True, 20_000), (True, 100_000), (False, 100_000)]))
def test_tokens_are_distributed_as_the_targets(library: ctypes.CDLL, certain: bool, count: int) -> None:
    suite.tokens_follow_the_target(library, count, 5000, certain)


def test_the_registry_finds_it() -> None:
    torch.manual_seed(1)
    sequence = suite.rejection(random.Random(1), 50, 3, 1.0, False)
    assert implementation("speculative_accept", "cpu")(*sequence) == implementation("speculative_accept")(*sequence)


@pytest.mark.parametrize("bug", first_now(["RATIO", "RESIDUAL", "PLACE"]))
def test_a_planted_bug_is_caught(bug: str) -> None:
    planted = mutant(f"ACCEPT_{bug}", ("speculative_accept",))
    assert is_caught(planted, [lambda lib: suite.it_is_the_references(lib, VOCABS[2:], 72)])
