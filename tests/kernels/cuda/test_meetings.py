"""Meetings of a megakernel's blocks (megakernel/grid.cuh) on the SIMT shim: nobody's row is served too early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.kernels.abi.native import I32, P
from baton.kernels.cuda import build
from baton.kernels.cuda.shim import Simt
from tests.kernels.compilers import needs_compiler
from tests.thorough import first_now

GATE, OPEN, COUNTS = 32, 96, 128  # grid.cuh: GridCount
BLOCKS, MOST_ROWS = 4, 8


@pytest.fixture(scope="module")
@needs_compiler()
def shim() -> Simt:
    return Simt(build.on_shim([Path(__file__).with_name("meetings.cu")]))


def meet(shim: Simt, counts: np.ndarray, rows: list[int]) -> None:
    """Launches once; every row must have seen what all blocks wrote before its meeting."""
    call, asked = shim["baton_meet"], np.array(rows, np.int32)
    call.argtypes = [P, P, I32, P, P, I32]
    written, sums = np.zeros(BLOCKS, np.uint32), np.zeros((len(rows), MOST_ROWS), np.uint32)
    arrays = (a.ctypes.data for a in (written, sums))
    call(counts.ctypes.data, asked.ctypes.data, len(rows), *arrays, BLOCKS)
    wanted = [[(i + 1) * BLOCKS * (row < count) for row in range(MOST_ROWS)] for i, count in enumerate(rows)]
    assert sums.tolist() == wanted


@pytest.mark.parametrize("seed", first_now(range(12), 3))
def test_a_row_is_served_when_all_have_arrived_and_nobody_enters_before(shim: Simt, seed: int) -> None:
    shim.schedule(seed, 100)
    counts = np.zeros(COUNTS, np.uint32)
    for rows in ([1, 2, 8, 0, 1], [5, 0, 0, 3], [1]):
        meet(shim, counts, rows)


@pytest.mark.parametrize("seed", first_now(range(12), 3))
def test_counts_may_turn_over(shim: Simt, seed: int) -> None:
    shim.schedule(seed, 100)
    counts = np.zeros(COUNTS, np.uint32)
    counts[[GATE, OPEN]] = 2**32 - 3
    for rows in ([2, 1, 8], [1, 4, 0, 2]):
        meet(shim, counts, rows)
    assert counts[OPEN] == 4


@pytest.mark.parametrize("seed", first_now(range(12), 3))
def test_days_of_meetings_for_one_row_leave_no_count_behind(shim: Simt, seed: int) -> None:
    """A lone sequence's steps: 2^31 meetings since anybody served several rows, then a second sequence comes."""
    shim.schedule(seed, 100)
    counts = np.zeros(COUNTS, np.uint32)
    counts[OPEN] = 2**31 + 5
    meet(shim, counts, [1, 1, 1])
    meet(shim, counts, [2, 3, 2, 8])
