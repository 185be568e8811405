"""Tests AMX's tiles: oracles, company, tiles given back, planted bugs.

They run on this CPU's tiles or on emulated ones; each test's name says which.
"""

from __future__ import annotations

import ctypes
import logging

import pytest
import torch

from baton.kernels.abi import build, native, tiles
from baton.kernels.paged_attention.native import attend
from tests.kernels import amx_suite as suite
from tests.kernels import attention_suite, head_suite, linear_suite
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant, sound
from tests.thorough import first_now

pytestmark = [needs_native, pytest.mark.skipif(suite.ON not in native.testable(), reason="this CPU has no AVX2")]
ATTENTION = ("paged_attention", "rope_append")
LAYERS = ("linear", "dense", "lm_head", "lora", "moe")
WHOLE = [form for form in linear_suite.FORMS | linear_suite.CPU_FORMS if form.startswith(("int", "codes"))]


@pytest.fixture(scope="module", params=[suite.ON])
def linear(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return mutant("NONE", LAYERS, request.param)


@pytest.fixture(scope="module", params=[suite.ON])
def attention(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return mutant("NONE", ATTENTION, request.param)


@pytest.mark.parametrize("check", suite.LINEAR, ids=lambda check: check.__name__)
def test_layers_by_tiles(linear: ctypes.CDLL, check: suite.Check) -> None:
    check(linear)


@pytest.mark.parametrize("check", suite.ATTENTION, ids=lambda check: check.__name__)
def test_attention_by_tiles(attention: ctypes.CDLL, check: suite.Check) -> None:
    check(attention)


@pytest.mark.parametrize("form", [form for form in WHOLE if "outliers" not in form])
def test_integers_have_the_bits_of_other_isas(linear: ctypes.CDLL, form: str) -> None:
    """Weight-only forms among them: tiles add none of these."""
    weight = (linear_suite.FORMS | linear_suite.CPU_FORMS)[form](torch.randn(70, 2100))
    x = torch.randn(37, 2100)
    found = linear_suite.guarded(linear, x, weight, None)
    for isa in native.able():
        if isa != suite.ON:
            assert torch.equal(found, linear_suite.guarded(sound(["linear"], isa), x, weight, None)), isa


@pytest.mark.skipif(suite.ON == "amx", reason="real tiles count nothing")
@pytest.mark.parametrize(
    ("form", "rows", "tiled"),
    [("bf16", 1, True), ("e4m3 g128", 1, True), ("int8", 1, False), ("int8", 8, True), ("int4 g32", 8, False),
     ("int4 g32", 16, True), ("int4 g64 mins", 16, True), ("codes g64", 16, True), ("codes g16", 50, False)],
)  # fmt: skip
def test_tiles_multiply_where_they_are_meant_to(linear: ctypes.CDLL, form: str, rows: int, tiled: bool) -> None:
    before = suite.products(linear)
    weight = (linear_suite.FORMS | linear_suite.CPU_FORMS)[form](torch.randn(66, 256))
    linear_suite.guarded(linear, torch.randn(rows, 256), weight, None)
    assert (suite.products(linear) > before) == tiled


@pytest.mark.skipif(suite.ON == "amx", reason="real tiles count nothing")
@pytest.mark.parametrize(("heads", "queries", "tiled"), [(4, 1, False), (8, 1, False), (10, 1, True), (4, 3, True)])
def test_attention_beside_bf16_goes_by_tiles_from_five_rows_on(
    attention: ctypes.CDLL, heads: int, queries: int, tiled: bool
) -> None:
    case = attention_suite.Case(0, "bfloat16", (heads, 2, 24), [(40, queries)])
    case.write(attention)
    before = suite.products(attention)
    attend(attention, case.q, case.kv, case.items)
    assert (suite.products(attention) > before) == tiled


@pytest.mark.thorough
@pytest.mark.skipif(suite.ON != "amx", reason="this CPU has no tiles")
@pytest.mark.parametrize("by", [1.0, 2.0**-63, 2.0**-126])
def test_real_tiles_add_as_emulated_ones_do(by: float) -> None:
    """Sums of pairs, also where products, sums or the numbers themselves are below 2^-126."""
    weight = linear_suite.FORMS["bf16"](torch.randn(70, 2100) * by)
    x = (torch.randn(37, 2100) * min(1.0, 2.0**-126 / by * 4)).bfloat16()
    real, emulated = (
        linear_suite.guarded(mutant("NONE", ["linear"], isa), x, weight, None) for isa in ("amx", build.EMULATED)
    )
    assert torch.equal(real, emulated)


@pytest.mark.parametrize(
    "bug",
    first_now(
        ["AMX_RELEASE", "AMX_TAIL", "AMX_START", "AMX_CHUNK", "AMX_PENDING", "LINEAR_GROUP", "LINEAR_GUARD"], 0
    ),
)
def test_a_planted_bug_in_layers_is_caught(bug: str) -> None:
    assert is_caught(mutant(bug, ["linear"], suite.ON), suite.LINEAR)


@pytest.mark.parametrize(
    "bug",
    first_now(
        ["AMX_RELEASE", "AMX_FEW", "AMX_FLUSH", "AMX_LOW", "WEIGHTS", "LAST_PAGE", "CAUSAL", "SCALE", "MERGE"], 0
    ),
)
def test_a_planted_bug_in_attention_is_caught(bug: str) -> None:
    assert is_caught(mutant(bug, ATTENTION, suite.ON), suite.ATTENTION)


@pytest.mark.parametrize("bug", first_now(["AMX_EXPERT", "AMX_RELEASE"], 0))
def test_a_planted_bug_in_experts_is_caught(bug: str) -> None:
    assert is_caught(mutant(bug, ("moe", "dense", "linear", "lora"), suite.ON), suite.EXPERTS)


@pytest.mark.parametrize("check", suite.EXPERTS, ids=lambda check: check.__name__)
def test_experts_by_tiles(linear: ctypes.CDLL, check: suite.Check) -> None:
    check(linear)


@pytest.mark.parametrize("check", head_suite.QUICK, ids=lambda check: check.__name__)
def test_heads_by_tiles(linear: ctypes.CDLL, check: suite.Check) -> None:
    check(linear)
    suite.tiles_are_given_back(linear)


@pytest.mark.parametrize("asked", ["", "amx"])
def test_a_kernel_that_refuses_tiles_gets_avx512_and_says_so_once(
    asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(native.ISA_ENV, asked)
    monkeypatch.setattr(native, "_cpu_flags", lambda: frozenset(native._NEEDS["amx"]))
    monkeypatch.setattr(tiles, "refusal", lambda: "Operation not permitted")
    native.isa.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "baton.kernels"):
            assert [native.isa(), native.isa()] == ["avx512", "avx512"]
        assert [record.getMessage() for record in caplog.records] == [
            "no AMX tiles, avx512 is used: Operation not permitted"
        ]
        monkeypatch.setattr(tiles, "refusal", lambda: None)
        native.isa.cache_clear()
        assert native.isa() == "amx"
        assert build.EMULATED not in native.testable()
    finally:
        monkeypatch.undo()
        native.isa.cache_clear()


def test_emulated_tiles_run_where_they_are_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.EMULATED not in native.able()
    monkeypatch.setenv(native.ISA_ENV, suite.ON)
    native.isa.cache_clear()
    try:
        assert native.isa() == suite.ON
    finally:
        monkeypatch.undo()
        native.isa.cache_clear()
