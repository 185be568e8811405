"""The native step's small ops: float64 oracles, the reference's bits, planted bugs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from baton.kernels.rms_norm.reference import normed
from tests.kernels import dense_suite
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant
from tests.kernels.rows_suite import (
    embedding_widens,
    geglu_is_exact,
    norms_are_right,
    parts_of_rows_are_normed,
    rms_norm,
    swiglu_is_exact,
)
from tests.thorough import first_now

pytestmark = needs_native


def test_norms_are_those_of_float64(library: ctypes.CDLL) -> None:
    norms_are_right(library)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch sums in other lanes here")
@pytest.mark.parametrize("hidden", [8, 40, 96, 257, 1000, 2048, 5000, 16384])
def test_norms_have_the_bits_of_the_reference(library: ctypes.CDLL, hidden: int) -> None:
    x, weight = torch.randn(50, hidden) * 3, torch.rand(hidden) + 0.5
    assert torch.equal(rms_norm(library, x.clone(), None, weight, 1e-5), normed(x, weight, 1e-5))


@pytest.mark.thorough
def test_a_norm_without_its_epsilon_is_caught() -> None:
    assert is_caught(mutant("NORM", ("rms_norm",)), [norms_are_right])


@pytest.mark.parametrize(
    ("bug", "check"),
    [("SWIGLU_TAIL", swiglu_is_exact), ("EMBEDDING_DTYPE", embedding_widens), ("GEGLU_CUBE", geglu_is_exact)],
    ids=["swiglu", "embedding", "geglu"],
)
def test_a_planted_bug_of_a_row_op_is_caught(bug: str, check: Callable[[ctypes.CDLL], None]) -> None:
    assert is_caught(mutant(bug, (bug.partition("_")[0].lower(),)), [check])


@pytest.mark.thorough
def test_a_norm_of_other_columns_is_caught() -> None:
    assert is_caught(mutant("NORM_PART", ("rms_norm",)), [parts_of_rows_are_normed])


@pytest.mark.parametrize("bug", first_now(["CHAIN", "BIAS"], 0))
def test_a_planted_bug_of_a_dense_layer_is_caught(bug: str) -> None:
    assert is_caught(mutant(f"DENSE_{bug}", ("dense", "linear")), dense_suite.CHECKS)


def test_swiglu_is_exact_at_any_size_and_sign(library: ctypes.CDLL) -> None:
    swiglu_is_exact(library)


def test_geglu_is_exact_at_any_size_and_sign(library: ctypes.CDLL) -> None:
    geglu_is_exact(library)


def test_columns_of_rows_are_normed_as_one_vector(library: ctypes.CDLL) -> None:
    parts_of_rows_are_normed(library)


def test_embedding_widens_its_table(library: ctypes.CDLL) -> None:
    embedding_widens(library)


@pytest.mark.parametrize(("n", "k"), dense_suite.SHAPES)
def test_dense_float32_is_close_to_float64_and_a_rows_bits_are_its_own(
    library: ctypes.CDLL, n: int, k: int
) -> None:
    dense_suite.is_close_and_a_rows_bits_are_its_own(library, n, k)


@pytest.mark.parametrize("k", dense_suite.DEPTHS)
@pytest.mark.parametrize("biased", [False, True])
def test_dense_float32_adds_bias_and_chains_in_order(library: ctypes.CDLL, k: int, biased: bool) -> None:
    dense_suite.adds_bias_and_chains_in_order(library, k, biased)


def test_a_bad_row_of_a_dense_layer_stays_alone(library: ctypes.CDLL) -> None:
    dense_suite.a_bad_row_stays_alone(library)


@pytest.mark.parametrize("check", dense_suite.HALVES)
def test_float16_weights_are_multiplied_as_float32_ones(
    library: ctypes.CDLL, check: Callable[[ctypes.CDLL], None]
) -> None:
    check(library)
