"""Native paged_attention and rope_append: float64 oracle, poison, bitwise company, planted bugs."""

from __future__ import annotations

import ctypes

import pytest
import torch

from baton.kernels.abi import build, native
from baton.kernels.paged_attention.native import append
from tests.kernels import attention_suite as suite
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant
from tests.thorough import first_now

pytestmark = needs_native


@pytest.mark.parametrize("shape", suite.SHAPES, ids=str)
@pytest.mark.parametrize("dtype", suite.DTYPES)
def test_attention_is_that_of_the_float64_oracle(
    library: ctypes.CDLL, dtype: str, shape: tuple[int, int, int]
) -> None:
    suite.attention_is_the_oracles(library, dtype, shape)


@pytest.mark.parametrize("window", [1, 16, 37, 300])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_window_hides_what_is_older(library: ctypes.CDLL, dtype: str, window: int) -> None:
    suite.attention_is_the_oracles(library, dtype, (6, 2, 24), window)


@pytest.mark.parametrize("dtype", suite.DTYPES)
def test_keys_with_one_value_give_that_value(library: ctypes.CDLL, dtype: str) -> None:
    suite.equal_values_come_back(library, dtype)


@pytest.mark.parametrize("window", [0, 130])
@pytest.mark.parametrize("dtype", suite.DTYPES)
def test_company_chunks_and_order_change_no_bit(library: ctypes.CDLL, dtype: str, window: int) -> None:
    suite.company_changes_no_bit(library, dtype, window)


@pytest.mark.parametrize(
    ("dtype", "window"), first_now([("bfloat16", 0), ("int8", 37), ("bfloat16", 37), ("int8", 0)], 2)
)
def test_a_decode_has_the_bits_of_a_chunk_in_every_group_and_head_size(
    library: ctypes.CDLL, dtype: str, window: int
) -> None:
    for shape in suite.GROUPS:
        suite.a_decode_has_a_chunks_bits(library, dtype, shape, window)


@pytest.mark.parametrize("shape", [(6, 2, 24), (4, 4, 64), (5, 1, 80)], ids=str)
@pytest.mark.parametrize("dtype", suite.DTYPES)
def test_appended_rows_read_back_and_nothing_else_changes(
    library: ctypes.CDLL, dtype: str, shape: tuple[int, int, int]
) -> None:
    suite.appended_rows_read_back(library, dtype, shape)


@pytest.mark.parametrize("dtype", suite.DTYPES)
def test_a_nan_row_of_a_chunk_is_nan_and_its_neighbours_are_as_before(library: ctypes.CDLL, dtype: str) -> None:
    case = suite.Case(8, dtype, (6, 2, 32), [(0, 40)])
    case.write(library)
    before = suite.attend(library, case.q, case.kv, case.items)
    case.q[10] = torch.nan
    found = suite.attend(library, case.q, case.kv, case.items)
    assert bool(torch.isnan(found[10]).all())
    assert torch.equal(found[11:], before[11:])
    assert torch.equal(found[:10], before[:10])


def test_threads_change_no_bit(library: ctypes.CDLL) -> None:
    case = suite.Case(5, "bfloat16", (12, 4, 64), [(519, 1), (0, 200), (2, 1)])
    case.write(library)
    before, found = native._threads, []
    for count in (1, 2, 5):
        native.set_threads(count)
        found.append(suite.attend(library, case.q, case.kv, case.items))
    native.set_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_norms_are_taken_before_the_rotation(library: ctypes.CDLL) -> None:
    case = suite.Case(6, "float32", (4, 2, 40), [(0, 5)])
    qkv, eps = case.qkv[0].clone(), 1e-5
    norms = torch.rand(40) + 0.5, torch.rand(40) + 0.5
    append(library, qkv, case.kv, [(case.items[0][0], 0, 5)], case.rope_angles, norms, eps)
    x = case.qkv[0].double()
    for part, weight, found in (
        (x[:, :4], norms[0], qkv[:, :4]),
        (x[:, 4:6], norms[1], case.stored(0)[0]),
    ):
        normed = part / (part.square().mean(-1, keepdim=True) + eps).sqrt() * weight
        torch.testing.assert_close(found, suite.rotate(normed.float(), case.rope_angles), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    first_now(["LAST_PAGE", "CAUSAL", "SCALE", "MERGE", "ROPE", "PAGE", "WEIGHTS", "NEAR", "WIDENED", "PAIRS"], 0),
)
def test_a_planted_bug_is_caught(name: str) -> None:
    assert is_caught(mutant(name, ("paged_attention", "rope_append")), suite.QUICK)


@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("dtype", suite.DTYPES)
def test_capped_scores_and_sinks_are_those_of_the_oracle(library: ctypes.CDLL, dtype: str, window: int) -> None:
    suite.forms_are_the_oracles(library, dtype, window)


@pytest.mark.parametrize("rotated", [2, 12, 24])
def test_a_part_of_each_head_rotates(library: ctypes.CDLL, rotated: int) -> None:
    suite.a_part_of_each_head_rotates(library, rotated)


@pytest.mark.parametrize("name", first_now(["SINK", "SOFTCAP", "ROTATED"], 0))
def test_a_planted_bug_of_a_form_is_caught(name: str) -> None:
    assert is_caught(mutant(name, ("paged_attention", "rope_append")), suite.FORMS)


@pytest.mark.thorough
@pytest.mark.parametrize("isa", [name for name in native.testable() if name != native.isa()])
@pytest.mark.parametrize("dtype", suite.DTYPES)
def test_other_instruction_sets_agree_with_the_oracle(isa: str, dtype: str) -> None:
    other = native.load(build.built(isa))
    suite.attention_is_the_oracles(other, dtype, (6, 2, 24), 37)
    suite.company_changes_no_bit(other, dtype)
    suite.forms_are_the_oracles(other, dtype, 37)
