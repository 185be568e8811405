"""CUDA's head on the SIMT shim by the CPU's suite: logits, the reference's tokens, schedules, planted bugs."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

from baton.kernels.abi import native
from baton.kernels.cuda import build, shim
from baton.kernels.linear.packed import pack_e4m3
from baton.kernels.linear.packed_floats import pack_f32
from baton.kernels.linear.reference import e4m3_rows
from tests.kernels import head_suite as suite
from tests.kernels.linear_suite import off
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

SEEDS = range(int(os.environ.get("BATON_CUDA_SEEDS", "1")))
SHAPES = ((1, 1, 1), (63, 8, 3), (65, 385, 2))
MANY_ROWS = {"float32": 17, "bf16": 67, "int8": 18, "int8 g16": 17, "int4 row": 17, "int4 g64 mins": 33}


def library(*flags: str, seed: int = 3, preempt: int = 0, races: bool = False) -> ctypes.CDLL:
    return shim.as_library(build.simt(["lm_head"], flags, races=races), seed=seed, preempt=preempt)


@pytest.mark.parametrize("form", suite.FORMS)
def test_logits_are_those_of_float64(form: str) -> None:
    suite.logits_are_the_oracles(library(), form, SHAPES)


@pytest.mark.parametrize("form", MANY_ROWS)
def test_more_rows_than_one_tile_are_too(form: str) -> None:
    suite.logits_are_the_oracles(library(), form, [(66, 80, MANY_ROWS[form])])


@pytest.mark.parametrize(("vocab", "k", "rows"), [(65, 40, 3), (130, 385, 18)])
def test_e4m3_weights_meet_e4m3_rows(vocab: int, k: int, rows: int) -> None:
    """The oracle is linear's reference, because the CPU's library has no such form."""
    weight = pack_e4m3((torch.randn(vocab, k) * 20).to(torch.float8_e4m3fn), torch.rand(vocab) + 0.5)
    x = torch.randn(rows, k) * 3
    q, scale = e4m3_rows(x)
    wanted = (q.double() @ weight.dequantized(torch.float64).T) * scale
    assert off(suite.logits_of(library(), weight, x), wanted) < 2e-6


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("vocab", [1, 5, 64, 777])
def test_tokens_are_those_of_the_reference_with_the_same_seed(vocab: int, seed: int) -> None:
    suite.tokens_are_the_references(library(seed=seed, preempt=50 * seed), vocab, seeds=1)


@pytest.mark.parametrize("form", ["bf16", "int8", "int4 row", "int4 g32", "int8 g512 mins"])
def test_a_rows_choice_is_the_same_alone_whatever_the_weights(form: str) -> None:
    suite.a_rows_choice_is_its_own(library(), form, vocab=200, seeds=3)


def test_float32_logits_have_the_cpus_bits() -> None:
    cpu = native.library()
    if cpu is None:
        pytest.skip("no native kernels here")
    for width in (40, 193, 400):
        packed, x = pack_f32(torch.randn(70, width)), torch.randn(3, width)
        assert torch.equal(suite.logits_of(library(), packed, x), suite.logits_of(cpu, packed, x))


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.8}], ids=str)
def test_frequencies_follow_the_softmax(fields: dict[str, Any]) -> None:
    suite.frequencies_follow_the_softmax(library(), fields, 200, 100)


def test_what_adapters_add_comes_before_all_else() -> None:
    suite.what_is_beside_comes_before_all_else(library())


@pytest.mark.parametrize("check", suite.QUICK, ids=lambda check: check.__name__)
def test_what_else_holds_of_a_head(check: suite.Check) -> None:
    check(library())


def test_no_schedule_races() -> None:
    for seed in SEEDS:
        suite.tokens_are_the_references(library(seed=seed, preempt=20, races=True), 71, 1, every=5)
        suite.tokens_are_the_references(library(seed=seed, preempt=20, races=True), 130, 1, "bf16", every=7)


BUGS: list[tuple[str, suite.Check]] = [
    ("HEAD_TAIL", lambda lib: suite.logits_are_the_oracles(lib, "bf16", SHAPES[1:2])),
    ("HEAD_SLABS", lambda lib: suite.logits_are_the_oracles(lib, "int8", SHAPES[1:2])),
    ("HEAD_PRESENCE", suite.penalties_are_of_what_was_said),
    ("HEAD_TOP_P", suite.filters_come_one_behind_the_other),
    ("DRAW_BARRIER", lambda lib: suite.tokens_are_the_references(lib, 71, 1, every=7)),
    ("HEAD_TIE", suite.ties_take_the_first_token),
    ("HEAD_BESIDE", suite.what_is_beside_comes_before_all_else),
]


@pytest.mark.parametrize(("bug", "check"), first_now(BUGS))
def test_a_planted_bug_is_caught(bug: str, check: suite.Check) -> None:
    checked = library(f"-DBATON_MUTATION_CUDA_{bug}", preempt=50, races=bug in ("HEAD_SLABS", "DRAW_BARRIER"))
    assert is_caught(checked, [check])
