"""The layer of experts of ``cuda.cu`` on the SIMT shim by the CPU's suite: oracle, schedules, planted bugs."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from baton.kernels.cuda import build, shim
from baton.kernels.moe.native import moe
from tests.kernels import expert_adapters_suite as adapted
from tests.kernels import moe_suite as suite
from tests.kernels.compilers import needs_compiler
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

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


NARROW = (adapted.narrow,)
ADAPTED_BUGS = {
    "EXPERT": adapted.they_are_the_oracles,
    "ADAPTER": adapted.company_changes_no_bit,
    "FIRST": adapted.company_changes_no_bit,
    "PART": adapted.they_are_the_oracles,
}


@pytest.mark.parametrize("check", adapted.NARROW, ids=lambda check: check.__name__)
def test_adapters_beside_experts_are_those_of_the_cpus_suite(check: adapted.Check) -> None:
    check(library(), NARROW)


def test_adapters_beside_experts_have_the_same_bits_in_every_schedule_and_none_races() -> None:
    case = suite.Case(2, (21, 40, 24, 5, 2))
    given = adapted.two(case.experts, 21)
    wanted = adapted.run(library(), case.experts, case.x, case.logits, given)
    for seed in SEEDS:
        for other in (library(seed=seed, preempt=100), library(seed=seed, preempt=20, races=True)):
            assert torch.equal(adapted.run(other, case.experts, case.x, case.logits, given), wanted)


def test_rows_without_an_adapter_have_the_bits_of_the_bare_op() -> None:
    case = suite.Case(5, adapted.SHAPE)
    found = adapted.run(library(), case.experts, case.x, case.logits, adapted.two(case.experts, adapted.SHAPE[0]))
    bare = moe(library(), case.experts, case.x, case.logits)
    assert torch.equal(found[2::3], bare[2::3])
    assert torch.equal(adapted.run(library(), case.experts, case.x, case.logits, []), bare)


def test_adapters_beside_experts_with_biases_are_refused() -> None:
    case = suite.Case(1, (2, 16, 8, 3, 1))
    with pytest.raises(AssertionError, match="status 1"):
        adapted.run(library(), case.experts, case.x, case.logits, [], case.gate())


@pytest.mark.parametrize("bug", first_now(sorted(ADAPTED_BUGS)))
def test_a_planted_bug_beside_experts_is_caught(bug: str) -> None:
    checked = library(f"-DBATON_MUTATION_CUDA_MOE_{bug}")
    assert is_caught(checked, [lambda of: ADAPTED_BUGS[bug](of, NARROW)])
