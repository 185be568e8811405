"""Native linear on every ISA of this CPU: float64 oracle, quality, poison, guards, company, planted bugs."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kernels.abi import build, native
from baton.kernels.linear import cpu, reference
from baton.kernels.linear.packed import W4, W8, PackedWeight, pack_bf16, pack_e4m3, quantize
from baton.kernels.linear.packed_floats import pack_f16, pack_f32
from baton.kernels.linear.rounding import EXACT, WHOLE, best_scale
from tests.kernels import linear_suite as suite
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant, sound
from tests.thorough import first_now

pytestmark = needs_native

FORMS = suite.FORMS | suite.CPU_FORMS
ISAS = native.testable()
BUGS = tuple(
    f"LINEAR_{what}"
    for what in (
        "GROUP",
        "ZERO",
        "GUARD",
        "BATCH",
        "TILE",
        "ABSMAX",
        "PAD",
        "CHUNK",
        "DEAL",
        "HALF",
        "SIGN",
        "EXACT",
        "TABLE",
        "ORDER",
        "ORDERS",
        "E4M3",
        "ODD",
        "BLOCK",
        "COMPANY",
        "SMALL",
        "LOWEST",
        "FOURS",
        "MIDDLES",
        "LATTER",
        "SHARE",
    )
)


@pytest.fixture(scope="module", params=first_now(ISAS))
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return sound(["linear"], request.param)


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_it_holds_on_every_isa(library: ctypes.CDLL, check) -> None:
    check(library)


@pytest.mark.thorough
def test_inputs_of_every_form_may_be_many(library: ctypes.CDLL) -> None:
    suite.inputs_of_every_form_may_be_many(library)


@pytest.mark.parametrize(
    "form",
    [
        form
        for form in FORMS
        if form.startswith(("int", "codes")) and "outliers" not in form and not form.endswith("by bf16")
    ],
)
def test_whole_numbers_come_to_the_same_bits_on_every_isa(form: str) -> None:
    torch.manual_seed(3)
    weight, x = FORMS[form](torch.randn(70, 1100)), torch.randn(35, 1100)
    for rows in (1, 2, 9, 35):
        found = [suite.guarded(sound(["linear"], isa), x[:rows], weight, None) for isa in ISAS]
        assert all(torch.equal(each, found[0]) for each in found)


def is_added_by_tiles(form: str) -> bool:
    """AMX's tiles add bf16 products of bf16 and fp8 weights, in an order of their own."""
    return form == "bf16" or (form.startswith(("fp8", "e4m3")) and "by e4m3" not in form)


@pytest.mark.parametrize(
    "form",
    [form for form in FORMS if "by" in form or "outliers" in form or form.startswith(("bf16", "fp8", "e4m3"))],
)
def test_float_sums_come_to_the_same_bits_where_tiles_do_not_add_them(form: str) -> None:
    torch.manual_seed(3)
    isas = [isa for isa in ISAS if not (isa.startswith("amx") and is_added_by_tiles(form))]
    weight, x = FORMS[form](torch.randn(70, 1100)), torch.randn(35, 1100)
    for rows in (1, 2, 3, 5, 9, 35):
        found = [suite.guarded(sound(["linear"], isa), x[:rows], weight, None) for isa in isas]
        assert all(torch.equal(each, found[0]) for each in found), rows


@settings(max_examples=25, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    n=st.integers(1, 150),
    k=st.integers(1, 600),
    m=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_shape_is_the_float64_oracles(form: str, n: int, k: int, m: int, dtype: torch.dtype) -> None:
    library = native.library()
    assert library is not None
    suite.is_the_exact_oracles(library, form, n, k, m, dtype)


# Bugs in code that only AVX-512 has: half panels, scales by sixteen columns, bytes looked up as bf16.
WIDE = {"LINEAR_BATCH", "LINEAR_HALF", "LINEAR_LOWEST", "LINEAR_LATTER"}
NARROW = {
    f"LINEAR_{what}" for what in ("ODD", "BLOCK", "COMPANY", "SMALL")
}  # that only AVX2 has: passes over a panel
NARROW_BYTES = {"LINEAR_FOURS"}  # that only AVX-VNNI has: products of bytes in AVX2's registers


@pytest.mark.parametrize("bug", first_now(BUGS))
def test_a_planted_bug_is_caught(bug: str) -> None:
    if bug in WIDE and not native.isa().startswith(("avx512", "amx")):
        pytest.skip(f"the code with this bug is not in a build for {native.isa()}")
    if bug in NARROW and "avx2" not in ISAS:
        pytest.skip("the code with this bug is in a build for AVX2")
    if bug in NARROW_BYTES and "avx_vnni" not in ISAS:
        pytest.skip("this CPU has no AVX-VNNI")
    isa = "avx2" if bug in NARROW else "avx_vnni" if bug in NARROW_BYTES else None
    checks = (*suite.CHECKS, suite.inputs_of_every_form_may_be_many)
    assert is_caught(mutant(bug, ["linear"], isa), checks)


@pytest.mark.thorough
def test_a_pool_that_returns_early_is_caught() -> None:
    """Runs in a process of its own: a task that outlives its call may take the process down."""
    code = f"""
from baton.kernels.abi import native
from tests.kernels import linear_suite
linear_suite.threads_finish_before_it_returns(native.load({mutant("THREADS_EARLY", ["linear"])._name!r}))
"""
    command, root = [sys.executable, "-c", code], build.KERNELS.parents[1]
    assert subprocess.run(command, cwd=root, stderr=subprocess.DEVNULL, check=False).returncode


@pytest.mark.parametrize(
    ("form", "most"), [("bf16", 0.004), ("int8", 0.012), ("int4 g32", 0.1), ("int4 g128", 0.12)]
)
def test_quantized_layers_are_near_the_unquantized_one(form: str, most: float) -> None:
    torch.manual_seed(0)
    w, x = torch.randn(256, 512), torch.randn(32, 512)
    assert suite.off(cpu.linear(x, suite.FORMS[form](w)), x.double() @ w.double().T) < most


@pytest.mark.parametrize("pack", [pack_f32, pack_f16])
def test_packed_floats_are_multiplied_by_the_reference_and_refused_by_native_code(
    pack: Callable[[torch.Tensor], PackedWeight],
) -> None:
    torch.manual_seed(0)
    plain, x = torch.randn(70, 96).half().float(), torch.randn(3, 96)
    assert torch.equal(cpu.linear(x, pack(plain)), reference.linear(x, plain))
    assert cpu.linear(x.bfloat16(), pack(plain)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="which dense multiplies"):
        cpu.run(native.function("linear", *cpu.ARGUMENTS), x, pack(plain))


def test_the_isas_agree_where_tiles_add() -> None:
    """All other sums come to the same bits, as the tests above say."""
    torch.manual_seed(1)
    x = torch.randn(9, 500)
    for form in filter(is_added_by_tiles, FORMS):
        weight = FORMS[form](torch.randn(130, 500))
        found = [cpu.run(suite.bound(sound(["linear"], isa)), x, weight) for isa in ISAS]
        for other in found[1:]:
            assert suite.off(other, found[0].double()) < 1e-5, form


def test_native_and_reference_round_activations_alike() -> None:
    torch.manual_seed(2)
    x = torch.randn(7, 333)
    for make in FORMS.values():
        weight = make(torch.randn(65, 333))
        assert suite.off(cpu.linear(x, weight), reference.linear(x, weight).double()) < 1e-5


def test_plain_tensors_stay_with_torch() -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    assert torch.equal(cpu.linear(x, w), reference.linear(x, w))


def test_without_a_library_packed_weights_still_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = quantize(torch.randn(20, 64), 8, 0), torch.randn(3, 64)
    wanted = cpu.linear(x, weight)
    monkeypatch.setattr(native, "library", lambda: None)
    assert suite.off(cpu.linear(x, weight), wanted.double()) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_unpacking_gives_back_what_was_packed(form: str) -> None:
    torch.manual_seed(4)
    weight = FORMS[form](torch.randn(67, 97))
    assert weight.dequantized().shape == weight.shape == (67, 97)
    if weight.kind in (W4, W8):
        high = 127 if "int8" in form else 7
        assert int(weight.integers().min()) >= -high - 1
        assert int(weight.integers().max()) <= high


def test_fp8_weights_are_kept_as_they_are_and_left_to_the_reference() -> None:
    torch.manual_seed(6)
    weight, scale, x = torch.randn(67, 97).to(torch.float8_e4m3fn), torch.rand(67) + 0.5, torch.randn(5, 97)
    packed = pack_e4m3(weight, scale)
    assert torch.equal(packed.dequantized(), weight.float() * scale[:, None])
    assert packed.nbytes == 128 * 104 + 4 * 128
    assert suite.off(cpu.linear(x, packed), x.double() @ packed.dequantized(torch.float64).T) < 0.03


def test_scales_that_are_float16_stay_exact_and_tiny_ones_do_not_vanish() -> None:
    q = torch.ones(64, 64, dtype=torch.int8)
    scales = (torch.rand(64, 2) + 0.5).half().float()
    packed = suite.pack_integers(q, 4, 32, scales)
    assert torch.equal(packed.dequantized()[:, ::32], scales)
    tiny = scales * 2.0**-40
    assert torch.equal(suite.pack_integers(q, 4, 32, tiny).dequantized()[:, ::32], tiny)


@pytest.mark.parametrize("group", [16, 32, 128, 1024])
def test_scales_of_our_own_groups_are_whole_so_that_sums_are_exact(group: int) -> None:
    weight = quantize(torch.randn(67, 300) * torch.rand(67, 1) * 1e-3, 4, group)
    assert weight.scales is not None
    assert torch.equal(weight.scales, weight.scales.round())
    assert float(weight.scales.abs().max()) <= WHOLE
    assert weight.exact == weight.struct.exact == EXACT


@pytest.mark.parametrize(
    "weight",
    [
        quantize(torch.randn(20, 96), 4, 48),
        quantize(torch.randn(20, 64), 4, 0),
        quantize(torch.randn(20, 64), 8, 32),
        suite.random_integers(torch.randn(20, 64), 4, 32),
        suite.pack_integers(torch.ones(64, 64, dtype=torch.int8), 4, 32, torch.rand(64, 2)),
    ],
    ids=["group 48", "rows", "8 bits", "mins", "a checkpoint's scales"],
)
def test_sums_by_other_scales_are_not_taken_for_exact(weight: PackedWeight) -> None:
    assert weight.exact == 0


def test_whole_scales_round_weights_as_well_as_any() -> None:
    torch.manual_seed(8)
    weight = torch.distributions.StudentT(4.0).sample((128, 1024))
    for group, most in ((32, 1.02), (128, 1.0)):
        parts = weight.view(128, -1, group)
        free = best_scale(parts)[..., None]
        by_free = (torch.round(parts / free).clamp(-8, 7) * free).view_as(weight)
        found = quantize(weight, 4, group).dequantized()
        assert float((found - weight).norm() / (by_free - weight).norm()) < most


def test_rows_of_nothing_but_zeros_stay_zero() -> None:
    weight = torch.randn(5, 64)
    weight[2], weight[3, :32] = 0, 0
    for bits, group in ((4, 32), (4, 0), (8, 0)):
        found = quantize(weight, bits, group).dequantized()
        assert not bool(found[2].any())
        assert not bool(found[3, :32].any())


def test_what_a_step_reads_is_counted() -> None:
    weight: PackedWeight = quantize(torch.randn(64, 128), 4, 32)
    assert weight.nbytes == 64 * 128 // 2 + 64 * 4 * 2 + 64 * 4
    assert pack_bf16(torch.randn(64, 128)).nbytes == 64 * 128 * 2
