"""CUDA linear on the SIMT shim: the CPU's suite, schedules, planted bugs; and what it has of its own:

rows that come rounded, a gate in the epilogue, int4 by bf16 rows.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.kernels.abi.native import I64, P, declare
from baton.kernels.cuda import build, shim
from baton.kernels.linear import cpu, reference
from baton.kernels.linear.packed import PackedWeight, pack_e4m3, pack_integers, quantize
from tests.kernels import linear_suite as suite
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

OPS = ("linear", "swiglu")
SEEDS = range(int(os.environ.get("BATON_CUDA_SEEDS", "1")))
INTEGERS = [form for form in suite.FORMS if form.startswith("int")]


def library(*flags: str, seed: int = 3, preempt: int = 0, races: bool = False) -> ctypes.CDLL:
    return shim.as_library(build.simt(OPS, flags, races=races), seed=seed, preempt=preempt)


def function(library: ctypes.CDLL, name: str) -> Callable[..., None]:
    return declare(library, name, *cpu.ARGUMENTS)


def run(
    library: ctypes.CDLL, name: str, x: Tensor, weight: PackedWeight, bias: Tensor | None, width: int
) -> Tensor:
    """One call of a symbol with linear's arguments, on ``width`` outputs."""
    out, code = torch.full((len(x), width), torch.nan, dtype=x.dtype), cpu.CODES[x.dtype]
    at_bias = None if bias is None else bias.data_ptr()
    function(library, name)(
        weight.address, x.data_ptr(), code, x.stride(0), len(x), at_bias, out.data_ptr(), code, out.stride(0)
    )
    return out


@pytest.mark.parametrize("check", suite.SHARED_CHECKS, ids=lambda check: check.__name__)
def test_the_cpus_suite_holds_on_the_shim(check: Callable[[ctypes.CDLL], None]) -> None:
    checked = library()
    check(checked)
    assert checked.launches() > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", ["bf16", "int8", "int4 g32", "int8 g16"])
def test_bfloat16_rows_in_and_out_at_any_place(form: str) -> None:
    for n, k, m in ((66, 96, 5), (130, 200, 140), (128, 256, 130)):
        suite.is_the_exact_oracles(library(), form, n, k, m, torch.bfloat16)


@pytest.mark.parametrize("m", [1, 17, 140])
@pytest.mark.parametrize("form", ["bf16", "int4 g32", "int8 g16"])
def test_no_schedule_changes_a_bit_and_none_races(form: str, m: int) -> None:
    torch.manual_seed(11)
    weight, x = suite.FORMS[form](torch.randn(40, 520)), torch.randn(m, 520)
    wanted = cpu.run(suite.bound(library()), x, weight)
    for seed in SEEDS:
        for other in (library(seed=seed, preempt=100), library(seed=seed, preempt=10, races=True)):
            assert torch.equal(cpu.run(suite.bound(other), x, weight), wanted)


@pytest.mark.parametrize("group", [48, 96])
def test_groups_that_are_no_power_of_two(group: int) -> None:
    torch.manual_seed(group)
    weight = quantize(torch.randn(70, 500), 4, group)
    for m in (3, 140):
        x = torch.randn(m, 500)
        assert suite.off(cpu.run(suite.bound(library()), x, weight), suite.exact(x, weight)) < 2e-6


@pytest.mark.parametrize("form", INTEGERS)
def test_rows_that_come_rounded_give_the_same_bits(form: str) -> None:
    torch.manual_seed(12)
    checked = library()
    call = declare(checked, "linear_rounded", P, P, P, I64, P, P, *cpu.ARGUMENTS[-2:])
    weight, bias = suite.FORMS[form](torch.randn(70, 560)), torch.randn(70)
    for m in (2, 140):
        x = torch.randn(m, 560)
        wanted = cpu.run(suite.bound(checked), x, weight, bias)
        q, scales = reference.quantize_rows(x)
        q8, scales, out = q.to(torch.int8), scales[:, 0].contiguous(), torch.full((m, 70), torch.nan)
        call(weight.address, q8.data_ptr(), scales.data_ptr(), m, bias.data_ptr(), out.data_ptr(), 0, 70)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("form", first_now([*suite.FORMS], 4))
def test_a_gate_in_the_epilogue_gives_the_bits_of_two_ops(form: str) -> None:
    torch.manual_seed(13)
    checked, inner = library(), 48
    weight, bias = suite.FORMS[form](torch.randn(2 * inner, 200)), torch.randn(2 * inner)
    for m in (3, 140):
        x = torch.randn(m, 200)
        both, wanted = cpu.run(suite.bound(checked), x, weight, bias), torch.empty(m, inner)
        declare(checked, "swiglu", P, I64, I64, P)(both.data_ptr(), m, inner, wanted.data_ptr())
        assert torch.equal(run(checked, "linear_swiglu", x, weight, bias, inner), wanted)


@pytest.mark.parametrize("form", [form for form in INTEGERS if form.startswith("int4")])
def test_int4_by_bfloat16_rows_is_the_float64_oracles(form: str) -> None:
    torch.manual_seed(14)
    checked = library()
    weight, bias, x = suite.FORMS[form](torch.randn(70, 700)), torch.randn(70), torch.randn(140, 700)
    whole = run(checked, "linear_a16", x, weight, bias, 70)
    exact = x.bfloat16().double() @ weight.dequantized(torch.float64).T + bias.double()
    assert suite.off(whole, exact) < 1e-6
    for m in (1, 20, 70):
        assert torch.equal(run(checked, "linear_a16", x[:m], weight, bias, 70), whole[:m])


TILES = (5, 12, 24, 40)  # rows: each has skinny tiles of its own


@pytest.mark.parametrize("group", [0, 32, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_tile_of_rows_has_the_bits_of_the_wide_ones(bits: int, group: int) -> None:
    """Groups of 64 have minimums, which is a form of its own; so is int4 by bfloat16 rows."""
    torch.manual_seed(17)
    plain, x, checked = torch.randn(70, 264), torch.randn(140, 264), library()
    weight = suite.random_integers(plain, bits, group) if group == 64 else quantize(plain, bits, group)
    for name in ("linear", "linear_a16")[: 2 if bits == 4 else 1]:
        whole = run(checked, name, x, weight, None, 70)
        rows = x.bfloat16().double() if name == "linear_a16" else None
        exact = suite.exact(x, weight) if rows is None else rows @ weight.dequantized(torch.float64).T
        assert suite.off(whole, exact) < 2e-6
        for m in TILES:
            assert torch.equal(run(checked, name, x[:m], weight, None, 70), whole[:m])


def test_fp8_and_int4_take_bfloat16_rows_with_the_bits_of_the_same_numbers_in_float32() -> None:
    torch.manual_seed(18)
    checked, x = library(), torch.randn(24, 264).bfloat16()
    for name, weight in (("linear", fp8(70, 264)), ("linear_a16", quantize(torch.randn(70, 264), 4, 32))):
        wide = run(checked, name, x.float(), weight, None, 70)
        for m in (12, 24):
            assert torch.equal(run(checked, name, x[:m], weight, None, 70), wide[:m].bfloat16())


def fp8(n: int, k: int) -> PackedWeight:
    return pack_e4m3((torch.randn(n, k) * 20).to(torch.float8_e4m3fn), torch.rand(n) + 0.5)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (70, 100), (130, 700)])
def test_fp8_by_fp8_rows_is_the_float64_oracles(n: int, k: int) -> None:
    torch.manual_seed(16)
    weight, bias, x = fp8(n, k), torch.randn(n), torch.randn(140, k)
    x[3] = 0
    whole = suite.guarded(library(), x, weight, bias)
    q, scale = reference.e4m3_rows(x)
    exact = (q.double() @ weight.dequantized(torch.float64).T) * scale.double() + bias.double()
    assert suite.off(whole, exact) < 1e-6
    assert suite.off(cpu.linear(x, weight, bias), exact) < 1e-5
    for m in (1, 20, 70):
        assert torch.equal(suite.guarded(library(), x[:m], weight, bias), whole[:m])
    x[1, 0], x[2, 0] = torch.nan, torch.inf
    found = cpu.run(suite.bound(library()), x, weight, bias)
    assert torch.equal(found[3:], whole[3:])
    assert not bool(found[1:3].isfinite().any())


def test_what_it_has_no_form_for_is_refused() -> None:
    x = torch.randn(1, 64)
    with pytest.raises(shim.SimtError, match="status 1"):
        run(library(), "linear_a16", x, quantize(torch.randn(64, 64), 8, 0), None, 64)
    with pytest.raises(shim.SimtError, match="status 1"):
        run(library(), "linear_swiglu", x, quantize(torch.randn(40, 64), 8, 0), None, 20)


def of_int4(n: int, k: int, m: int) -> Callable[[ctypes.CDLL], None]:
    return lambda lib: suite.is_the_exact_oracles(lib, "int4 g32", n, k, m, torch.float32)


def int4_rows_keep_their_bits(library: ctypes.CDLL) -> None:
    """The scales are a checkpoint's, because sums over whole ones, as our own are, have the same bits in any
    order.
    """
    torch.manual_seed(15)
    x, q = torch.randn(140, 1000), torch.randint(-8, 8, (40, 1000), dtype=torch.int8)
    weight = pack_integers(q, 4, 32, torch.rand(40, 32) * 0.1 + 0.01)
    whole = cpu.run(suite.bound(library), x, weight)
    for m in (1, 20, 70):
        assert torch.equal(cpu.run(suite.bound(library), x[:m], weight), whole[:m]), m


BUGS: tuple[tuple[str, Callable[[ctypes.CDLL], None]], ...] = (
    *((bug, of_int4(40, 700, 5)) for bug in ("GROUP", "ZERO", "SLICE", "GUARD", "WAIT")),
    ("BATCH", int4_rows_keep_their_bits),
    *((bug, of_int4(8, 600, 2)) for bug in ("ABSMAX", "RING", "MERGE")),
    ("STAGE", of_int4(40, 300, 260)),
)
DROPPED_BARRIERS = ("ABSMAX", "RING", "MERGE", "STAGE")


def planted(bug: str, races: bool) -> ctypes.CDLL:
    """Built for int4 in groups alone."""
    return library(*(f"-DBATON_MUTATION_CUDA_LINEAR_{name}" for name in (bug, "SMALL")), races=races)


@pytest.mark.parametrize("races", [False, True])
def test_without_a_bug_the_same_checks_hold(races: bool) -> None:
    for _, check in BUGS:
        check(planted("NONE", races))


@pytest.mark.parametrize(("bug", "check"), first_now(BUGS), ids=[bug for bug, _ in BUGS])
def test_a_planted_bug_is_caught(bug: str, check: Callable[[ctypes.CDLL], None]) -> None:
    assert is_caught(planted(bug, bug in DROPPED_BARRIERS), [check])
