"""Attention of long chunks of a prompt on the SIMT shim: float64 oracle, company, schedules, planted bugs."""

from __future__ import annotations

import ctypes
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from baton.kernels.abi.native import declare
from baton.kernels.cuda import build, shim
from baton.kernels.paged_attention.native import Item, Pages, item_table
from tests.kernels import attention_suite as suite
from tests.kernels.mutants import is_caught
from tests.kernels.thorough import first_now

OPS = ("prompt_attention", "rope_append")
P, I32, I64, F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
LEAST = 64  # queries of an item that is attended here (prompt.h)
# On the error of a row as a share of V's RMS: q and weights are rounded, to bf16 or to f16.
CLOSE = {"bfloat16": 6e-3, "int8": 1e-3, "fp8_e4m3": 1e-3}
SHAPES = ((6, 2, 32), (1, 1, 64), (4, 1, 128), (5, 5, 80))
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


@pytest.mark.parametrize("window", [1, 37, 90])
@pytest.mark.parametrize("dtype", first_now(("bfloat16", "int8")))
def test_a_window_hides_what_is_older(dtype: str, window: int) -> None:
    is_the_oracles(library(), dtype, (6, 2, 32), window, [(100, 64), (3, 90)])


@pytest.mark.parametrize("dtype", first_now(("bfloat16", "int8", "fp8_e4m3")))
def test_a_row_has_its_bits_in_any_long_chunk_and_beside_a_sequence_that_is_not_a_number(dtype: str) -> None:
    checked = library()
    case = suite.Case(3, dtype, (6, 2, 32), [(0, 230), (30, 70)])
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


def test_no_schedule_changes_a_bit_and_none_races() -> None:
    case = suite.Case(5, "int8", (6, 2, 32), [(19, 66), (0, 80)])
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
