"""Meetings of ranks on cards (collective/cuda.cu) on the SIMT shim: in one process with others' rooms played by
hand, and in a process for each rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.program.rank_program import Rank
from baton.kernels.abi.native import I32, I64, P, declare
from baton.kernels.collective.cards import MOST_CARDS, ExchangeStruct
from baton.kernels.cuda import build, on_gpu, shim
from tests.kernels.compilers import needs_compiler
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

STUCK, BEGUN, DONE, LOST = 1 << 16, 8, 12, 16  # exchange.h: CARD_STUCK; where a head has them
FLAGS, BLOCKS = 128, 32  # where a head's flags begin, and how many a rank has: MOST_MEETING_BLOCKS
HEAD = FLAGS + 8 * MOST_CARDS * BLOCKS
WAIT_S = 60.0


@needs_compiler()
def library(bug: str = "", races: bool = False) -> ctypes.CDLL:
    extra = (f"-DBATON_MUTATION_CUDA_MEET_{bug}",) if bug else ()
    return shim.as_library(build.simt(("collective",), extra, races), preempt=100)


by_processes = pytest.mark.skipif(on_gpu.asked(), reason="a fork of a process that uses a GPU can't use it")


def shared(size: int) -> np.ndarray:
    """Returns zeros that forked processes share; on a GPU of the heap, which alone may be registered."""
    return np.zeros(size, np.uint8) if on_gpu.asked() else np.frombuffer(mmap.mmap(-1, size), np.uint8)


class Rooms:
    """Rooms of some ranks in memory that forked processes share."""

    def __init__(self, count: int, half_floats: int) -> None:
        self.count, self.half_floats, self.bytes = count, half_floats, HEAD + 8 * half_floats
        self.memory, self.lost = shared(self.bytes * count).reshape(count, self.bytes), shared(4096).view(np.uint32)

    def view(self, rank: int, bound_s: float = WAIT_S) -> ExchangeStruct:
        at = [self.memory.ctypes.data + rank * self.bytes for rank in range(self.count)]
        rooms = (P * MOST_CARDS)(*at)
        return ExchangeStruct(rooms, self.lost.ctypes.data, self.half_floats, int(bound_s * 1e9), rank, self.count)

    def flags(self, rank: int) -> np.ndarray:
        return self.memory[rank, FLAGS:HEAD].view(np.uint64).reshape(MOST_CARDS, BLOCKS)

    def half(self, rank: int, epoch: int) -> np.ndarray:
        return self.memory[rank, HEAD:].view(np.float32).reshape(2, -1)[epoch % 2]

    def said(self, rank: int) -> int:
        return int(self.memory[rank, LOST : LOST + 4].view(np.uint32)[0])

    def epoch(self, rank: int) -> int:
        return int(self.memory[rank, :8].view(np.uint64)[0])


def columns(library: ctypes.CDLL, view: ExchangeStruct, whole: Tensor, part: tuple[int, int]) -> Tensor:
    """The rank's own columns of ``whole`` in, all ranks' out."""
    rows, width = whole.shape
    own, out = whole[:, part[0] : part[1]].contiguous(), torch.full((rows, width), torch.nan)
    call = declare(library, "gather_columns", P, P, I64, I64, I64, I64, P)
    call(ctypes.addressof(view), own.data_ptr(), own.shape[1], part[0], rows, width, out.data_ptr())
    return out


def rows_of(
    library: ctypes.CDLL, view: ExchangeStruct, whole: Tensor, tokens: Tensor, part: tuple[int, int]
) -> Tensor:
    """The rows of the rank's own tokens in, all ranks' out."""
    rows, width = whole.shape
    mine = (tokens >= part[0]) & (tokens < part[1])
    own, out = torch.where(mine[:, None], whole, torch.nan), torch.full((rows, width), torch.nan)
    call = declare(library, "gather_rows", P, P, P, I64, I64, I64, I64, P)
    at = own.data_ptr(), tokens.data_ptr(), part[1] - part[0], part[0]
    call(ctypes.addressof(view), *at, rows, width, out.data_ptr())
    return out


# What a rank does, its peers played: two meetings, so that both halves are read and written.


def a_rank_pushes_what_is_its_own_and_takes_the_rest(library: ctypes.CDLL) -> None:
    for rows, width, part in ((3, 21, (6, 13)), (2, 64, (16, 48)), (70, 130, (0, 64)), (1, 3, (2, 3))):
        pad = -(-width // 4) * 4
        rooms = Rooms(3, rows * pad)
        rooms.flags(1)[[0, 2]] = 2  # both peers have come twice
        for epoch in (1, 2):
            whole = torch.randn(rows, width)
            room = rooms.half(1, epoch).reshape(rows, pad)
            room[:] = np.nan
            room[:, :width] = whole
            room[:, part[0] : part[1]] = np.nan  # nobody pushes what is this rank's
            assert torch.equal(columns(library, rooms.view(1, 5.0), whole, part), whole)
            for peer in (0, 2):
                pushed = rooms.half(peer, epoch).reshape(rows, pad)[:, part[0] : part[1]]
                assert (pushed == whole[:, part[0] : part[1]].numpy()).all(), "what was pushed"
                assert rooms.flags(peer)[1].max() == epoch
                assert (rooms.flags(peer)[[0, 2]] == 0).all()
            assert (rooms.epoch(1), rooms.memory[1, BEGUN], rooms.memory[1, DONE]) == (epoch, 0, 0)


def a_rank_waits_for_each_peers_newest_flag(library: ctypes.CDLL) -> None:
    rooms, whole = Rooms(2, 64), torch.randn(2, 8)
    rooms.flags(0)[1] = 1
    columns(library, rooms.view(0, 0.02), whole, (0, 4))
    assert rooms.said(0) == 0
    columns(library, rooms.view(0, 0.02), whole, (0, 4))  # whose flag is of the meeting before
    assert rooms.said(0) == 2 | STUCK
    assert (rooms.flags(1)[0, 0], rooms.epoch(0)) == (2, 2)


def parts_go_over_as_halves_hold_them(library: ctypes.CDLL) -> None:
    rooms = Rooms(2, 3 * 12)  # three rows at a time
    rooms.flags(0)[1] = 9
    columns(library, rooms.view(0, 5.0), torch.randn(8, 10), (0, 10))
    assert (rooms.epoch(0), rooms.said(0)) == (3, 0)


def parts_are_taken_in_the_order_in_which_blocks_come(library: ctypes.CDLL) -> None:
    """One block at a time, of a peer that has pushed the first part alone: whoever is first must take that."""
    for seed in range(0 if on_gpu.asked() else 6):  # a GPU runs all of them at once
        library.schedule(seed, 0, 1)  # type: ignore[attr-defined]
        rooms, whole = Rooms(2, 8 * 1024), torch.randn(1, 8 * 1024)
        rooms.flags(0)[1, 0] = 1
        columns(library, rooms.view(0, 0.01), whole, (0, 4096))
        assert rooms.flags(1)[0, :3].tolist() == [1, 1, 0], "the second part was begun, and waited for in vain"


ALONE: tuple[Callable[[ctypes.CDLL], None], ...] = (
    a_rank_pushes_what_is_its_own_and_takes_the_rest,
    a_rank_waits_for_each_peers_newest_flag,
    parts_go_over_as_halves_hold_them,
    parts_are_taken_in_the_order_in_which_blocks_come,
)


@pytest.mark.parametrize("check", ALONE, ids=lambda check: check.__name__)
@pytest.mark.parametrize("races", [False, True], ids=["plain", "race checks"])
def test_a_rank_among_played_peers(check: Callable[[ctypes.CDLL], None], races: bool) -> None:
    check(library(races=races))


@pytest.mark.parametrize("bug", first_now(["HALF", "WAIT", "OWN", "DONE", "ORDER"], 2))
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert is_caught(library(bug), ALONE)


@by_processes  # whose errors are another library's
def test_a_row_wider_than_a_half_is_refused() -> None:
    with pytest.raises(shim.SimtError):
        columns(library(), Rooms(2, 8).view(0), torch.randn(1, 9), (0, 4))


# Processes.


@contextmanager
def ranks(count: int, work: Callable[[int], None]) -> Iterator[list[int]]:
    """Processes of ranks 1 … ``count`` - 1, which exit with 0 if ``work`` returns; they are killed at the end."""
    pids = []
    for rank in range(1, count):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                work(rank)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    try:
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def ended(pids: list[int]) -> list[int]:
    """Waits for the processes' own end and returns their statuses, without reaping them."""
    return [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status for pid in pids]  # type: ignore[union-attr]


CASES = [(rows, width) for width in (10, 64, 200) for rows in (1, 3, 40, 90)]  # up to 18 blocks


def meet_often(library: ctypes.CDLL, rooms: Rooms, rank: int) -> None:
    """Meetings of all sizes one behind the other, by columns and by rows; ranks are late by turns."""
    made = torch.Generator().manual_seed(3)
    own = Rank(rank, rooms.count)
    for number, (rows, width) in enumerate(CASES):
        whole = torch.randn(rows, width, generator=made)
        tokens = torch.randint(0, 50, (rows,), generator=made, dtype=torch.int32)
        if number % rooms.count == rank:
            time.sleep(0.002)
        assert torch.equal(columns(library, rooms.view(rank), whole, own.part(width)), whole)
        assert torch.equal(rows_of(library, rooms.view(rank), whole, tokens, own.part(50)), whole)


@by_processes
@pytest.mark.parametrize("count", first_now([3, 2, 4], 1))
def test_every_rank_has_all_columns_and_all_rows(count: int) -> None:
    built, rooms = library(), Rooms(count, 18_000)
    with ranks(count, lambda rank: meet_often(built, rooms, rank)) as pids:
        meet_often(built, rooms, 0)
        assert ended(pids) == [0] * (count - 1)
    assert all(rooms.said(rank) == 0 for rank in range(count))


@by_processes
def test_a_rank_that_is_killed_in_a_meeting_ends_it_by_the_hosts_word() -> None:
    built, rooms = library(), Rooms(2, 64)
    whole = torch.randn(2, 8)
    with ranks(2, lambda rank: signal.pause()) as pids:

        def watch() -> None:
            os.kill(pids[0], signal.SIGKILL)
            os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
            rooms.lost[0] = 2

        thread = threading.Thread(target=watch)
        thread.start()
        columns(built, rooms.view(0, 0), whole, (0, 4))  # without a bound
        thread.join()
        assert rooms.said(0) == 2
        pushed = rooms.half(1, 0).copy()
        columns(built, rooms.view(0, 0), whole, (0, 4))  # returns at once, and writes nothing to whoever is gone
        assert (rooms.half(1, 0) == pushed).all()
        assert rooms.epoch(0) == 2


@by_processes
def test_a_rank_that_stands_still_is_named_after_the_bound() -> None:
    built, rooms = library(), Rooms(3, 64)
    whole = torch.randn(2, 8)

    def work(rank: int) -> None:
        if rank == 1:
            columns(built, rooms.view(rank, 0.3), whole, (4, 6))
        else:
            signal.pause()

    with ranks(3, work) as pids:
        columns(built, rooms.view(0, 0.3), whole, (0, 4))
        assert ended(pids[:1]) == [0]
    assert [rooms.said(rank) for rank in (0, 1)] == [3 | STUCK] * 2


@by_processes
def test_a_room_is_opened_by_its_handle_in_another_process() -> None:
    built = library()
    raw = built.library if isinstance(built, shim.Simt) else built
    at, handle = P(), ctypes.create_string_buffer(64)
    raw.baton_room_make.argtypes = [I64, P, P]
    raw.baton_room_open.argtypes = [P, I64, P]
    raw.baton_room_close.argtypes = [P, I64, I32]
    assert raw.baton_room_make(16, ctypes.byref(at), handle) == 0
    assert at.value is not None
    last = (ctypes.c_float).from_address(at.value + HEAD + 4 * 31)

    def work(rank: int) -> None:
        theirs = P()
        assert raw.baton_room_open(handle, 16, ctypes.byref(theirs)) == 0
        assert theirs.value is not None
        ctypes.c_float.from_address(theirs.value + HEAD + 4 * 31).value = 7.0

    with ranks(2, work) as pids:
        assert ended(pids) == [0]
    assert last.value == 7.0
    assert raw.baton_room_close(at, 16, 1) == 0
    assert raw.baton_room_open(handle, 16, ctypes.byref(P())) != 0
