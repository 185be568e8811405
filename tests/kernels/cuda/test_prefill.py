"""Linear's warp-group kernel for many rows (linear/many/prefill.cuh) on the SIMT shim; twins read descriptors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from baton.kernels.abi.native import I64, P, declare
from baton.kernels.linear import cpu, reference
from baton.kernels.linear.packed import PackedWeight
from tests.kernels import linear_suite as suite
from tests.kernels.cuda import test_linear as few
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

# The shim has three multiprocessors: three tiles of 128 rows by 256 outputs are many. n, k, m.
SHAPES = ((700, 72, 65), (66, 520, 257), (513, 1000, 130), (130, 385, 500), (256, 1024, 300))
CASES = (
    *(("bf16", *shape) for shape in SHAPES),
    *(("int8", *shape) for shape in SHAPES[1:4]),
    ("fp8 row", *SHAPES[1]),
)
FORMS = ("bf16", "int8", "fp8 row")


@pytest.mark.parametrize(("form", "n", "k", "m"), CASES)
def test_many_rows_are_the_float64_oracles(form: str, n: int, k: int, m: int) -> None:
    suite.is_the_exact_oracles(few.library(), form, n, k, m, torch.float32)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_bfloat16_rows_in_and_out(form: str) -> None:
    suite.is_the_exact_oracles(few.library(), form, 66, 200, 300, torch.bfloat16)


def made(form: str, n: int, k: int) -> PackedWeight:
    return few.fp8(n, k) if form == "e4m3" else suite.FORMS[form](torch.randn(n, k))


@pytest.mark.parametrize("form", first_now(["e4m3", *FORMS], 2))
def test_a_row_has_the_same_bits_alone_in_wide_tiles_and_here(form: str) -> None:
    torch.manual_seed(21)
    weight, x, linear = made(form, 66, 1000), torch.randn(300, 1000), suite.bound(few.library())
    whole = cpu.run(linear, x, weight)
    assert torch.equal(cpu.run(linear, x[:140], weight), whole[:140])
    for i in (0, 128, 299):
        assert torch.equal(cpu.run(linear, x[i : i + 1], weight), whole[i : i + 1])


def test_fp8_by_fp8_rows_is_the_float64_oracles() -> None:
    torch.manual_seed(22)
    weight, bias, x = few.fp8(70, 700), torch.randn(70), torch.randn(290, 700)
    q, scale = reference.e4m3_rows(x)
    exact = (q.double() @ weight.dequantized(torch.float64).T) * scale.double() + bias.double()
    assert suite.off(suite.guarded(few.library(), x, weight, bias), exact) < 1e-6


@pytest.mark.parametrize("form", [*FORMS, "e4m3"])
def test_a_gate_in_the_epilogue_gives_the_bits_of_two_ops(form: str) -> None:
    torch.manual_seed(23)
    checked, inner, m = few.library(), 208, 200
    weight, bias, x = made(form, 2 * inner, 200), torch.randn(2 * inner), torch.randn(m, 200)
    both, wanted = cpu.run(suite.bound(checked), x, weight, bias), torch.empty(m, inner)
    declare(checked, "swiglu", P, I64, I64, P)(both.data_ptr(), m, inner, wanted.data_ptr())
    assert torch.equal(few.run(checked, "linear_swiglu", x, weight, bias, inner), wanted)


def test_rows_that_are_not_numbers_stay_alone() -> None:
    torch.manual_seed(24)
    linear = suite.bound(few.library())
    for form in FORMS:
        weight, x = made(form, 66, 200), torch.randn(300, 200)
        clean = cpu.run(linear, x, weight)
        x[2, 199], x[130, 11] = torch.nan, torch.inf
        found, rest = cpu.run(linear, x, weight), [i for i in range(300) if i not in (2, 130)]
        assert torch.equal(found[rest], clean[rest])
        assert not bool(found[[2, 130]].isfinite().any())


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_no_schedule_changes_a_bit_and_none_races(form: str) -> None:
    torch.manual_seed(25)
    weight, x = made(form, 40, 520), torch.randn(257, 520)
    wanted = cpu.run(suite.bound(few.library()), x, weight)
    for seed in few.SEEDS:
        for other in (few.library(seed=seed, preempt=100), few.library(seed=seed, races=True)):
            assert torch.equal(cpu.run(suite.bound(other), x, weight), wanted)


def of_bf16(n: int, k: int, m: int) -> Callable[[ctypes.CDLL], None]:
    return lambda lib: suite.is_the_exact_oracles(lib, "bf16", n, k, m, torch.float32)


# What is read too early or at the wrong place; the last is a race that only some schedules show.
BUGS = ("WAIT", "PARITY", "SWIZZLE", "STRIDE", "EMPTY", "ARRIVALS")


def planted(bug: str, races: bool = False) -> ctypes.CDLL:
    """Built for bf16 and many rows alone."""
    flags = (f"-DBATON_MUTATION_CUDA_LINEAR_PREFILL_{bug}", "-DBATON_MUTATION_CUDA_LINEAR_MANY")
    return few.library(*flags, races=races)


@pytest.mark.parametrize("races", [False, True])
def test_without_a_bug_the_same_check_holds(races: bool) -> None:
    of_bf16(40, 700, 130)(planted("NONE", races))


@pytest.mark.parametrize("bug", first_now(BUGS))
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert is_caught(planted(bug, races=bug == "ARRIVALS"), [of_bf16(40, 700, 130)])


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
def test_the_whole_library_takes_this_kernel_for_many_rows(form: str) -> None:
    """Seen by a bug that nothing else would notice."""
    broken = few.library("-DBATON_MUTATION_CUDA_LINEAR_PREFILL_STRIDE")
    assert is_caught(broken, [lambda lib: suite.is_the_exact_oracles(lib, form, 66, 200, 300, torch.float32)])
    suite.is_the_exact_oracles(broken, form, 66, 200, 100, torch.float32)
