"""Attention of long chunks of a prompt on the SIMT shim: float64 oracle, company, schedules, planted bugs."""

from __future__ import annotations

import ctypes
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from baton.kernels.abi.native import declare
from baton.kernels.cuda import build, shim
from baton.kernels.cuda.library import Rehearsal
from baton.kernels.paged_attention.native import Item, Pages, item_table
from tests.kernels import attention_suite as suite
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

OPS = ("prompt_attention", "rope_append")
P, I32, I64, F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
LEAST = 64  # queries of an item that is attended here (prompt.h)
# On the error of a row as a share of V's RMS: q and weights are rounded, to bf16 or to f16.
CLOSE = {"bfloat16": 6e-3, "int8": 1e-3, "fp8_e4m3": 1e-3}
SHAPES = ((6, 2, 32), (1, 1, 64), (4, 1, 128), (5, 5, 80))
# Of bf16 KV by warp groups: heads that fill their 64 or 128 numbers and such that don't, groups of 1 to 8.
PAIRS = ((1, 1, 64), (8, 1, 128), (6, 2, 48), (5, 1, 96), (2, 2, 112))
# (tokens before, new tokens): one tile and several, whole and not, a decode and a short chunk among them.
SIZES = [(0, 70), (299, 1), (100, 64), (5, 63), (37, 130)]


def library(*flags: str, seed: int = 3, preempt: int = 0, races: bool = False) -> ctypes.CDLL:
    return shim.as_library(build.simt(OPS, flags, races=races), seed=seed, preempt=preempt)


def attend(checked: ctypes.CDLL, q: Tensor, kv: Pages, items: list[Item], window: int = 0) -> Tensor:
    """Returns the rows of items with LEAST queries or more; those of others stay NaN."""
    call = declare(checked, "prompt_attention", P, P, I32, I32, I32, F, P, I64, P, I64)
    table, kept = item_table(items)
    struct, out = kv.struct, torch.full_like(q, torch.nan)
    call(
        *(ctypes.byref(struct), table.ctypes.data, len(items), q.shape[1], window, kv.head_dim**-0.5),
        *(q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0)),
    )
    del kept
    return out


def is_the_oracles(
    checked: ctypes.CDLL,
    dtype: str,
    shape: tuple[int, int, int],
    window: int = 0,
    sizes: list[tuple[int, int]] = SIZES,
) -> None:
    """Ragged batches over permuted tables, unused slots NaN; what is not of long chunks stays as it was."""
    case = suite.Case(7 + window, dtype, shape, sizes)
    case.write(checked)
    found, wanted = attend(checked, case.q, case.kv, case.items, window), suite.oracle(case, window)
    for end, (_, queries) in zip(accumulate(queries for _, queries in sizes), sizes, strict=True):
        mine = found[end - queries : end]
        if queries < LEAST:
            assert bool(mine.isnan().all())
            continue
        assert bool(torch.isfinite(mine).all())
        error = (mine - wanted[end - queries : end]).double().square().mean(-1).sqrt().max()
        assert error <= CLOSE[dtype], (dtype, shape, window, float(error))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", suite.DTYPES[1:2] + suite.DTYPES[3:])
def test_long_chunks_are_the_float64_oracles(dtype: str, shape: tuple[int, int, int]) -> None:
    is_the_oracles(library(), dtype, shape)


@pytest.mark.parametrize("shape", PAIRS, ids=str)
def test_wide_heads_of_bfloat16_are_by_warp_groups_and_the_float64_oracles(shape: tuple[int, int, int]) -> None:
    checked, width = library(), 64 if shape[2] <= 64 else 128
    choose, seen = declare(checked, "prompt_warp_groups", I32), checked.rehearsal  # type: ignore[attr-defined]
    seen.note()
    is_the_oracles(checked, "bfloat16", shape)
    assert attended(seen) == {f"prompt_attention prompt_pair<{width}>"}
    choose(0)
    try:
        seen.note()
        is_the_oracles(checked, "bfloat16", shape, 0, SIZES[:1])
        assert attended(seen) == {f"prompt_attention prompt<1, {width}>"}
    finally:
        choose(1)


def attended(seen: Rehearsal) -> set[str]:
    return {kernel for kernel in seen.launched() if kernel.startswith("prompt_attention")}


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("window", [1, 37, 90, 200])
@pytest.mark.parametrize("dtype", first_now(("bfloat16", "int8")))
def test_a_window_hides_what_is_older(dtype: str, window: int, dim: int) -> None:
    is_the_oracles(library(), dtype, (6, 2, dim), window, [(100, 64), (3, 90), (310, 64)])


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("dtype", first_now(("bfloat16", "int8", "fp8_e4m3")))
def test_a_row_has_its_bits_in_any_long_chunk_and_beside_a_sequence_that_is_not_a_number(
    dtype: str, dim: int
) -> None:
    checked = library()
    case = suite.Case(3, dtype, (6, 2, dim), [(0, 230), (30, 70)])
    case.write(checked)
    whole = attend(checked, case.q, case.kv, case.items)
    pages = case.items[0][0]
    for start, queries in ((0, 64), (1, 100), (129, 101)):
        rows = case.q[start : start + queries].contiguous()
        part = attend(checked, rows, case.kv, [(pages, start, queries)])
        assert torch.equal(part, whole[start : start + queries]), (start, queries)
    poisoned = case.q.clone()
    poisoned[240] = torch.nan
    beside = attend(checked, poisoned, case.kv, case.items)
    others = [*range(240), *range(241, 300)]
    assert torch.equal(beside[others], whole[others])
    assert bool(torch.isnan(beside[240]).all())


@pytest.mark.parametrize(("dtype", "dim"), [("int8", 32), ("bfloat16", 64)])
def test_no_schedule_changes_a_bit_and_none_races(dtype: str, dim: int) -> None:
    case = suite.Case(5, dtype, (6, 2, dim), [(19, 66), (0, 80), (290, 64)])
    first = library()
    case.write(first)
    wanted = attend(first, case.q, case.kv, case.items)
    for seed in range(2):
        for other in (library(seed=seed, preempt=100), library(seed=seed, preempt=20, races=True)):
            assert torch.equal(attend(other, case.q, case.kv, case.items), wanted)


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 32), ("int8", 24), ("bfloat16", 24), ("bfloat16", 144)])
def test_what_it_has_no_form_for_is_refused(dtype: str, dim: int) -> None:
    case = suite.Case(1, dtype, (2, 1, dim), [(0, 64)])
    with pytest.raises(shim.SimtError, match="status 1"):
        attend(library(), case.qkv[0][:, :2].contiguous(), case.kv, case.items)


@pytest.mark.parametrize(
    "bug", first_now(["PROMPT_CAUSAL", "PROMPT_HEAD", "CASCADE_KEEP", "PROMPT_BARRIER", "CASCADE_BARRIER"])
)
def test_a_planted_bug_is_caught(bug: str) -> None:
    checked = library(f"-DBATON_MUTATION_CUDA_{bug}", preempt=50, races=bug.endswith("BARRIER"))
    assert is_caught(checked, [lambda lib: is_the_oracles(lib, "int8", (6, 2, 32))])


# Of warp groups: what is read too early, overwritten too early, or at the wrong place.
PAIR_BUGS = ("PARITY", "WAIT", "LEADING", "CAUSAL", "KEEP", "BEYOND", "EMPTY", "ARRIVALS")


def by_warp_groups(checked: ctypes.CDLL) -> None:
    """Five tiles, so that slots of V come round, too; a window's first tile, a diagonal that crosses two tiles."""
    for dim, window, sizes in ((64, 0, [(530, 64)]), (128, 0, [(100, 64)]), (64, 40, [(300, 64)])):
        is_the_oracles(checked, "bfloat16", (3, 1, dim), window, sizes)


@pytest.mark.parametrize("races", [False, True])
def test_without_a_bug_the_same_check_of_warp_groups_holds(races: bool) -> None:
    by_warp_groups(library("-DBATON_MUTATION_CUDA_PROMPT_NONE", preempt=50, races=races))


@pytest.mark.parametrize("bug", first_now(PAIR_BUGS))
def test_a_planted_bug_of_warp_groups_is_caught(bug: str) -> None:
    checked = library(
        f"-DBATON_MUTATION_CUDA_PROMPT_{bug}", preempt=50, races=bug in ("EMPTY", "ARRIVALS", "PARITY")
    )
    assert is_caught(checked, [by_warp_groups])
