"""Tests products with a norm before them or a gate in their epilogue on every ISA: the ops' bits, guards, bugs."""

from __future__ import annotations

import ctypes

import pytest

from baton.kernels.abi import build, native
from tests.kernels import gated_suite as suite
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant, sound
from tests.thorough import first_now

pytestmark = needs_native
OPS = ("linear", "swiglu", "rms_norm")


@pytest.fixture(scope="module", params=first_now(native.testable()))
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return sound(OPS, request.param)


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_it_holds_on_every_isa(library: ctypes.CDLL, check) -> None:
    check(library)


@pytest.mark.thorough
@pytest.mark.skipif("avx2" not in native.able(), reason="emulated tiles stand beside AVX2's forms")
def test_it_holds_by_emulated_tiles() -> None:
    library = mutant("NONE", OPS, build.EMULATED)
    suite.it_has_the_bits_of_both_ops(library)
    suite.norms_within_a_product_change_no_bit(library)


@pytest.mark.thorough
@pytest.mark.skipif(build.EMULATED not in native.testable() and "amx" not in native.able(), reason="no tiles here")
def test_a_planted_bug_beside_norms_is_caught() -> None:
    isa = "amx" if "amx" in native.able() else build.EMULATED
    assert is_caught(mutant("LINEAR_NORMED", OPS, isa), (suite.norms_within_a_product_change_no_bit,))


@pytest.mark.parametrize("bug", first_now(["LINEAR_GATES", "LINEAR_GATED"], 0))
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert is_caught(mutant(bug, OPS), suite.CHECKS)
