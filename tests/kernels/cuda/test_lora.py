"""lora's ``cuda.cu`` on the SIMT shim: the CPU's suite, schedules, races, planted bugs."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from baton.kernels.cuda import build, shim
from tests.kernels import lora_suite as suite
from tests.kernels.compilers import needs_compiler
from tests.kernels.mutants import is_caught

SEEDS = range(int(os.environ.get("BATON_CUDA_SEEDS", "1")))
BUGS = {
    "GROUP": suite.company_changes_no_bit,
    "TAIL": suite.it_is_the_references,
    "PART": suite.parts_keep_to_their_outputs,
    "BARRIER": suite.parts_keep_to_their_outputs,
    "REUSE": suite.parts_keep_to_their_outputs,
}


@needs_compiler()
def library(*flags: str, seed: int = 3, preempt: int = 0, races: bool = False) -> ctypes.CDLL:
    return shim.as_library(build.simt(("lora",), flags, races=races), seed=seed, preempt=preempt)


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_the_cpus_suite_holds_on_the_shim(check: suite.Check) -> None:
    check(library())


@pytest.mark.parametrize("aligned", [True, False])
def test_a_rows_bits_are_the_same_wherever_it_lies(aligned: bool) -> None:
    """Rows may begin at any float of the arena; the order of their sums does not depend on it."""
    x, out, parts = torch.randn(4, 70), torch.randn(4, 72), (suite.matrices(8, 70, 72),)
    shifted = torch.zeros(4, 72 if aligned else 71)[:, :70].copy_(x)
    wanted = suite.run(library(), [(range(4), parts)], out, x)
    assert torch.equal(suite.run(library(), [(range(4), parts)], out, shifted), wanted)


def test_no_schedule_changes_a_bit_and_none_races() -> None:
    x, out = torch.randn(11, 72), torch.randn(11, 140)
    parts = suite.matrices(8, 72, 70), suite.matrices(5, 72, 33, torch.bfloat16, first=100)
    groups: list[suite.Group] = [((0, 2, *range(3, 11)), parts), ([1], parts[:1])]
    wanted = suite.run(library(), groups, out, x)
    for seed in SEEDS:
        for other in (library(seed=seed, preempt=100), library(seed=seed, preempt=5, races=True)):
            assert torch.equal(suite.run(other, groups, out, x), wanted)


@pytest.mark.parametrize("bug", sorted(BUGS))
def test_a_planted_bug_is_caught(bug: str) -> None:
    races = bug in ("BARRIER", "REUSE")
    assert is_caught(library(f"-DBATON_MUTATION_CUDA_LORA_{bug}", races=races), [BUGS[bug]])
