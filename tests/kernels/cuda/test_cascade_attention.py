"""Cascade attention of ``cuda.cu`` on the SIMT shim by the CPU's suite: oracle, schedules, planted bugs."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from baton.kernels.cascade_attention.native import cascade
from baton.kernels.cuda import build, shim
from tests.kernels import cascade_suite as suite
from tests.kernels.compilers import needs_compiler
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

OPS = ("cascade_attention", "paged_attention", "rope_append")
SEEDS = range(int(os.environ.get("BATON_CUDA_SEEDS", "2")))


@needs_compiler()
def library(*flags: str, seed: int = 3, preempt: int = 0, races: bool = False) -> ctypes.CDLL:
    return shim.as_library(build.simt(OPS, flags, races), seed, preempt)


@pytest.mark.parametrize("shape", suite.SHAPES, ids=str)
def test_a_cascade_of_bfloat16_is_that_of_the_float64_oracle(shape: tuple[int, int, int]) -> None:
    suite.it_is_the_oracles(library(), "bfloat16", shape)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *(("int8", (6, 2, 48)), ("int8", (2, 1, 128)), ("int8", (2, 1, 256))),
        *(("fp8_e4m3", (5, 1, 80)), ("fp8_e4m3", (2, 1, 256))),
    ],
    ids=str,
)
def test_of_8_bits_it_is_too(dtype: str, shape: tuple[int, int, int]) -> None:
    suite.it_is_the_oracles(library(), dtype, shape)


@pytest.mark.parametrize(("dtype", "which"), [("bfloat16", 0), ("fp8_e4m3", 0), ("int8", 2)])
def test_suffixes_of_any_length_are_merged(dtype: str, which: int) -> None:
    suite.it_is_the_oracles(library(), dtype, (2, 1, 32), which)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_company_in_a_group_changes_no_bit(dtype: str) -> None:
    suite.company_changes_no_bit(library(), dtype)


def test_one_group_and_many_are_right() -> None:
    suite.one_group_or_many(library())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_no_schedule_changes_a_bit_and_none_races(dtype: str) -> None:
    first = library()
    case = suite.prepared(first, 2, dtype, (6, 2, 16), [(288, [(3, 1), (-1, 1), (0, 20)]), (0, [(9, 1)])])
    wanted = cascade(first, case.q, case.kv, case.items, case.groups)
    for seed in SEEDS:
        for other in (library(seed=seed, preempt=100), library(seed=seed, preempt=20, races=True)):
            assert torch.equal(cascade(other, case.q, case.kv, case.items, case.groups), wanted)


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 32), ("int8", 24), ("bfloat16", 24), ("bfloat16", 272)])
def test_what_it_has_no_form_for_is_refused(dtype: str, dim: int) -> None:
    case = suite.Shared(1, dtype, (2, 1, dim), [(16, [(0, 1)])])
    with pytest.raises(AssertionError, match="status 1"):
        cascade(library(), case.qkv[0][:1, :2].contiguous(), case.kv, case.items, case.groups)


BUGS = ("CASCADE_SCALE", "CASCADE_KEEP", "MERGE", "CASCADE_PAGE", "CASCADE_BARRIER", "CASCADE_ARRIVE")


@pytest.mark.parametrize("bug", first_now(BUGS))
def test_a_planted_bug_is_caught(bug: str) -> None:
    checked = library(f"-DBATON_MUTATION_CUDA_{bug}", preempt=50, races=bug == "CASCADE_BARRIER")
    one: tuple[suite.Check, ...] = (lambda lib: suite.it_is_the_oracles(lib, "int8", (6, 2, 16)),)
    assert is_caught(checked, (suite.one_group_or_many,) if bug == "CASCADE_ARRIVE" else one)
