"""The layer of experts of ``cuda.cu`` on the SIMT shim by the CPU's suite: oracle, schedules, planted bugs."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from baton.kernels.cuda import build, shim
from baton.kernels.moe.native import moe
from tests.kernels import moe_suite as suite
from tests.kernels.compilers import needs_compiler
from tests.kernels.mutants import is_caught
from tests.kernels.thorough import first_now

SEEDS = range(int(os.environ.get("BATON_CUDA_SEEDS", "2")))


@needs_compiler()
def library(*flags: str, seed: int = 3, preempt: int = 0, races: bool = False) -> ctypes.CDLL:
    return shim.as_library(build.simt(["moe"], flags, races), seed, preempt)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("shape", first_now(suite.SHAPES, 3, whole=True), ids=str)
def test_experts_are_those_of_the_float64_oracle(shape: tuple[int, int, int, int, int], renormalise: bool) -> None:
    suite.it_is_the_oracles(library(), shape, renormalise)


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_checks_hold(check: suite.Check) -> None:
    check(library())


def test_no_schedule_changes_a_bit_and_none_races() -> None:
    case = suite.Case(2, (40, 136, 40, 6, 2))
    wanted = moe(library(), case.experts, case.x, case.logits)
    for seed in SEEDS:
        for other in (library(seed=seed, preempt=100), library(seed=seed, preempt=20, races=True)):
            assert torch.equal(moe(other, case.experts, case.x, case.logits), wanted)


@pytest.mark.parametrize(
    "shape", [(1, 12, 8, 2, 1), (1, 8, 20, 2, 1), (1, 8, 8, 513, 1), (1, 8, 8, 20, 17)], ids=str
)
def test_what_it_has_no_form_for_is_refused(shape: tuple[int, int, int, int, int]) -> None:
    case = suite.Case(1, shape)
    with pytest.raises(AssertionError, match="status 1"):
        moe(library(), case.experts, case.x, case.logits)


@pytest.mark.parametrize("bug", first_now(["SORT_BARRIER", "TIES", "PLACE", "STAGE_BARRIER"]))
def test_a_planted_bug_is_caught(bug: str) -> None:
    checked = library(f"-DBATON_MUTATION_CUDA_MOE_{bug}", preempt=50, races="BARRIER" in bug)
    assert is_caught(checked, suite.QUICK)
