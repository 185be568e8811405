"""CUDA dense over float32 weights on the SIMT shim: the CPU's suite, the CPU's bits, schedules, planted bugs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import pytest
import torch

from baton.kernels.abi import native
from baton.kernels.cuda import build, shim
from baton.kernels.linear.packed import quantize
from baton.kernels.linear.packed_floats import pack_f32
from tests.kernels import dense_suite as suite
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

OPS = ("dense", "linear")
SEEDS = range(int(os.environ.get("BATON_CUDA_SEEDS", "1")))


def library(*flags: str, seed: int = 3, preempt: int = 0, races: bool = False) -> ctypes.CDLL:
    return shim.as_library(build.simt(OPS, flags, races=races), seed=seed, preempt=preempt)


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_the_cpus_suite_holds_on_the_shim(check: Callable[[ctypes.CDLL], None]) -> None:
    check(library())


@pytest.mark.parametrize("k", first_now([385, 192, 200, 6200], 2))
def test_the_bits_are_the_cpus(k: int) -> None:
    if (cpu := native.library()) is None:
        pytest.skip("no native kernels here")
    weight, bias = pack_f32(torch.randn(70, k)), torch.randn(70)
    for m in (1, 3, 8, 9, 33, 140) if k < 1000 else (1, 9):
        for x in (torch.randn(m, k), torch.randn(m, k + 3)[:, 2 : 2 + k]):
            assert torch.equal(suite.dense(library(), weight, x, bias), suite.dense(cpu, weight, x, bias))


@pytest.mark.parametrize("m", [1, 4, 40])
def test_no_schedule_changes_a_bit_and_none_races(m: int) -> None:
    weight, x = pack_f32(torch.randn(40, 250)), torch.randn(m, 250)
    wanted = suite.dense(library(), weight, x)
    for seed in SEEDS:
        for other in (library(seed=seed, preempt=100), library(seed=seed, preempt=5, races=True)):
            assert torch.equal(suite.dense(other, weight, x), wanted)


def test_other_kinds_go_to_linear() -> None:
    weight, x = quantize(torch.randn(40, 64), 4, 32), torch.randn(3, 64)
    assert float((suite.dense(library(), weight, x) - x @ weight.wide.T).abs().max()) < 0.5


BUGS: tuple[tuple[str, Callable[[ctypes.CDLL], None]], ...] = (
    ("CHAIN", lambda lib: suite.is_close_and_a_rows_bits_are_its_own(lib, 65, 257)),
    ("GUARD", lambda lib: suite.is_close_and_a_rows_bits_are_its_own(lib, 63, 24)),
    ("BARRIER", lambda lib: suite.adds_bias_and_chains_in_order(lib, 384, True)),
    ("REUSE", lambda lib: suite.adds_bias_and_chains_in_order(lib, 6400, True)),
    ("STAGE", lambda lib: suite.is_close_and_a_rows_bits_are_its_own(lib, 20, 100)),
)


@pytest.mark.parametrize(("bug", "check"), first_now(BUGS), ids=[bug for bug, _ in BUGS])
def test_a_planted_bug_is_caught(bug: str, check: Callable[[ctypes.CDLL], None]) -> None:
    races = bug in ("BARRIER", "REUSE", "STAGE")
    assert is_caught(library(f"-DBATON_MUTATION_CUDA_DENSE_{bug}", races=races), [check])
