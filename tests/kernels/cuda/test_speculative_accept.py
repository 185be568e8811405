"""CUDA's speculative_accept on the SIMT shim by the CPU's suite: reference, chi-square, schedules, planted bugs."""

from __future__ import annotations

import ctypes
import os

import pytest

from baton.kernels.cuda import build, shim
from tests.kernels import accept_suite as suite
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

SEEDS = range(int(os.environ.get("BATON_CUDA_SEEDS", "1")))


def library(*flags: str, seed: int = 3, preempt: int = 0, races: bool = False) -> ctypes.CDLL:
    return shim.as_library(build.simt(["speculative_accept"], flags, races=races), seed=seed, preempt=preempt)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_what_the_reference_says(seed: int) -> None:
    suite.it_is_the_references(library(seed=seed, preempt=50 * seed), (2, 31), 36)
    suite.it_is_the_references(library(seed=seed), (4099,), 9)


@pytest.mark.parametrize("check", suite.QUICK, ids=lambda check: check.__name__)
def test_what_else_holds_of_it(check: suite.Check) -> None:
    check(library())


def test_tokens_are_distributed_as_the_targets() -> None:
    suite.tokens_follow_the_target(library(), 400, 200, False)


def test_no_schedule_races() -> None:
    for seed in SEEDS:
        suite.it_is_the_references(library(seed=seed, preempt=20, races=True), (31,), 12)


@pytest.mark.parametrize("bug", first_now(["DRAW_BARRIER", "ACCEPT_RATIO", "ACCEPT_RESIDUAL", "ACCEPT_TOTAL"]))
def test_a_planted_bug_is_caught(bug: str) -> None:
    checked = library(f"-DBATON_MUTATION_CUDA_{bug}", preempt=50, races=bug == "DRAW_BARRIER")
    cases = 9 if bug == "DRAW_BARRIER" else 36
    assert is_caught(checked, [lambda lib: suite.it_is_the_references(lib, (300,), cases)])
