"""Cascade attention on the CPU: its float64 oracle, flat attention's bits, groups from block tables, bugs."""

from __future__ import annotations

import ctypes

import pytest
import torch

from baton.kernels.cascade_attention.native import cascade, groups_of
from baton.kernels.cascade_attention.reference import cascade_attention
from baton.kernels.paged_attention.native import attend
from tests.kernels import cascade_suite as suite
from tests.kernels.attention_suite import oracle
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant
from tests.thorough import first_now

NATIVE = ("cascade_attention", "paged_attention", "rope_append")
DTYPES = ("float32", "float16", *suite.DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", first_now(suite.SHAPES, 3, whole=True), ids=str)
def test_a_cascade_is_that_of_the_float64_oracle(
    library: ctypes.CDLL, dtype: str, shape: tuple[int, int, int]
) -> None:
    suite.it_is_the_oracles(library, dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", range(len(suite.FAMILIES)))
def test_on_the_cpu_a_group_changes_no_bit_of_flat_attention(library: ctypes.CDLL, dtype: str, which: int) -> None:
    case = suite.prepared(library, which, dtype, (6, 2, 48), suite.FAMILIES[which])
    flat = attend(library, case.q, case.kv, case.items)
    assert torch.equal(cascade(library, case.q, case.kv, case.items, case.groups), flat)


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_in_a_group_changes_no_bit(library: ctypes.CDLL, dtype: str) -> None:
    suite.company_changes_no_bit(library, dtype)


def test_one_group_and_many_are_right(library: ctypes.CDLL) -> None:
    suite.one_group_or_many(library)


def test_the_reference_is_flat_attention(library: ctypes.CDLL) -> None:
    case = suite.prepared(library, 1, "float32", (6, 2, 32), [(48, [(-1, 1), (3, 1), (0, 4)])])
    parts = [case.stored(at) for at in range(3)]
    own = [(keys[48:].double(), values[48:].double()) for keys, values in parts]
    prefix = parts[0][0][:48].double(), parts[0][1][:48].double()
    found = cascade_attention(case.q.double(), prefix, own, [1, 1, 4], 32**-0.5)
    torch.testing.assert_close(found, oracle(case, 0), atol=1e-12, rtol=1e-12)


def test_groups_are_runs_of_tables_that_begin_alike() -> None:
    shared = list(range(40))
    items = [
        ([*shared, 50], 640, 1),
        ([*shared[:36], 51, 52, 53, 54, 55], 640, 1),
        ([*shared, 56], 639, 1),
        ([57, *shared], 650, 1),
        ([57, *shared], 650, 1),
        ([57, *shared], 100, 1),
    ]
    assert groups_of(items) == [(0, 3, 576), (3, 2, 640)]
    assert groups_of(items, 600) == [(3, 2, 640)]
    assert groups_of(items, 96) == [(0, 3, 576), (3, 3, 96)]
    assert groups_of([]) == []


@needs_native
@pytest.mark.parametrize("bug", first_now(["CASCADE_TWICE", "CASCADE_MERGE", "MERGE", "CAUSAL"], 0))
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert is_caught(mutant(bug, NATIVE), suite.QUICK)
