"""CUDA paged attention on the SIMT shim by the CPU's suite: float64 oracle, company, schedules, planted bugs."""

from __future__ import annotations

import ctypes

import pytest
import torch

from baton.kernels.cuda import build, shim
from tests.kernels import attention_suite as suite
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

OPS = ("paged_attention", "rope_append")
DTYPES = ("bfloat16", "int8", "fp8_e4m3")
# Of 8-bit rows, 16 bytes must be 16 elements of one head: head_dim 8 and 24 are bfloat16's alone.
SHAPES = [shape for shape in suite.SHAPES if shape[2] % 16 == 0]


def library(*flags: str, seed: int = 3, preempt: int = 0, races: bool = False) -> ctypes.CDLL:
    return shim.as_library(build.simt(OPS, flags, races=races), seed=seed, preempt=preempt)


@pytest.mark.parametrize(
    "shape", SHAPES[:2] + [pytest.param(s, marks=pytest.mark.thorough) for s in SHAPES[2:]], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_that_of_the_float64_oracle(dtype: str, shape: tuple[int, int, int]) -> None:
    suite.attention_is_the_oracles(library(), dtype, shape)


@pytest.mark.parametrize("shape", [(1, 1, 8), (6, 2, 24)], ids=str)
def test_narrow_heads_of_bfloat16_are_too(shape: tuple[int, int, int]) -> None:
    suite.attention_is_the_oracles(library(), "bfloat16", shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_widest_heads_are_too(dtype: str) -> None:
    suite.attention_is_the_oracles(library(), dtype, (2, 1, 256))


def test_a_launch_with_more_shared_memory_than_48_kib_that_does_not_opt_in_is_refused() -> None:
    """Heads of 256 numbers take 43 KiB of dynamic memory beside 8 KiB of static."""
    checked = library("-DBATON_MUTATION_CUDA_OPT_IN")
    suite.attention_is_the_oracles(checked, "bfloat16", (8, 2, 128))
    with pytest.raises(shim.SimtError, match="that doesn't opt in can have 49152"):
        suite.attention_is_the_oracles(checked, "bfloat16", (2, 1, 256))


@pytest.mark.parametrize("window", [1, 37, 300])
@pytest.mark.parametrize("dtype", first_now(DTYPES))
def test_a_window_hides_what_is_older(dtype: str, window: int) -> None:
    suite.attention_is_the_oracles(library(), dtype, (6, 2, 32), window)


@pytest.mark.parametrize("dtype", first_now(DTYPES))
def test_company_chunks_and_order_change_no_bit(dtype: str) -> None:
    suite.company_changes_no_bit(library(), dtype)


def test_no_schedule_changes_a_bit_and_none_races() -> None:
    case = suite.Case(5, "int8", (6, 2, 32), [(519, 1), (20, 9), (2, 1), (255, 2)])
    first = library()
    case.write(first)
    wanted = suite.attend(first, case.q, case.kv, case.items)
    for seed in range(4):
        for other in (library(seed=seed, preempt=100), library(seed=seed, preempt=20, races=True)):
            assert torch.equal(suite.attend(other, case.q, case.kv, case.items), wanted)


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 32), ("int8", 24), ("bfloat16", 20), ("bfloat16", 264)])
def test_what_it_has_no_form_for_is_refused(dtype: str, dim: int) -> None:
    case = suite.Case(1, dtype, (2, 1, dim), [(0, 1)])
    with pytest.raises(shim.SimtError, match="status 1"):
        suite.attend(library(), case.qkv[0][:, :2].contiguous(), case.kv, case.items)


@pytest.mark.parametrize("bug", first_now(["COLLECT_BARRIER", "CAUSAL", "SCALE", "LAST_PAGE", "MERGE", "LAST"]))
def test_a_planted_bug_is_caught(bug: str) -> None:
    checked = library(f"-DBATON_MUTATION_CUDA_{bug}", preempt=50, races=bug == "COLLECT_BARRIER")
    assert is_caught(checked, [lambda lib: suite.attention_is_the_oracles(lib, "int8", (6, 2, 32))])
