"""Collectives over shared memory: sums in the ranks' order, parts larger than a slot, ranks that die or stand
still.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.collective import oracle
from baton.kernels.collective.native import STUCK, Collective, RankIsLost, group_at, group_bytes, lose
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant

pytestmark = needs_native

Work = Callable[[Collective, int], object]
SEAT, AWAITS = 64, 8  # collective.h: bytes of a Seat, and where it says for whom its rank waits


class Region:
    """Shared memory of a group, which forked children have too."""

    def __init__(self, count: int, slot_bytes: int = 4096, bound_s: float = 60.0) -> None:
        self.count, self._slot_bytes, self._bound_s = count, slot_bytes, bound_s
        self._map = mmap.mmap(-1, group_bytes(count, slot_bytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def rank(self, index: int) -> Collective:
        return Collective(group_at(self.address, index, self.count, self._slot_bytes, self._bound_s))


def together(region: Region, work: Work) -> list[object]:
    """Runs ``work(collective, rank)`` on a thread per rank; returns what each comes to."""
    found: list[object] = [None] * region.count

    def run(index: int) -> None:
        found[index] = work(region.rank(index), index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(region.count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


@contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """A forked process that runs ``work`` and waits to be killed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            signal.pause()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def parts(count: int, n: int, seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=made) * 10.0 ** float(rank) for rank in range(count)]


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 5), n=st.integers(1, 3000), rounds=st.integers(1, 4), seed=st.integers(0, 99))
def test_sums_are_added_in_the_order_of_the_ranks(count: int, n: int, rounds: int, seed: int) -> None:
    of = [parts(count, n, seed + at) for at in range(rounds)]

    def work(ranks: Collective, index: int) -> list[Tensor]:
        mine = [one[index].clone() for one in of]
        for x in mine:
            ranks.all_reduce(x.data_ptr(), n)
        return mine

    wanted = [oracle.all_reduce(one) for one in of]
    for found in together(Region(count), work):
        assert isinstance(found, list)
        assert all(torch.equal(x, sums) for x, sums in zip(found, wanted, strict=True))


@settings(max_examples=15, deadline=None)
@given(count=st.integers(1, 5), n=st.integers(1, 2500), seed=st.integers(0, 99))
def test_parts_are_gathered_and_exchanged_by_rank(count: int, n: int, seed: int) -> None:
    mine, others = parts(count, n, seed), [torch.randn(count, n) for _ in range(count)]

    def work(ranks: Collective, index: int) -> tuple[Tensor, Tensor]:
        whole, came = torch.empty(count * n), torch.empty(count, n)
        ranks.all_gather(mine[index].data_ptr(), n, whole.data_ptr())
        ranks.all_to_all(others[index].data_ptr(), n, came.data_ptr())
        return whole, came

    for index, found in enumerate(together(Region(count), work)):
        assert isinstance(found, tuple)
        assert torch.equal(found[0], oracle.all_gather(mine))
        assert torch.equal(found[1], oracle.all_to_all(others, index))


def nobody_meets_alone(library: ctypes.CDLL) -> None:
    region = Region(2, bound_s=0.01)
    group = group_at(region.address, 0, 2, 4096, 0.01)
    assert library.baton_collective_meet(ctypes.byref(group)) == 2 | STUCK


def test_a_meeting_that_waits_for_nobody_is_caught(library: ctypes.CDLL) -> None:
    nobody_meets_alone(library)
    assert is_caught(mutant("COLLECTIVE_MEET", ("collective",)), [nobody_meets_alone])


def test_nobody_passes_a_meeting_before_all_have_come() -> None:
    region, counted, rounds = Region(3), [0, 0, 0], 300

    def work(ranks: Collective, index: int) -> bool:
        ahead = False
        for turn in range(1, rounds + 1):
            counted[index] = turn
            ranks.meet()
            ahead = ahead or min(counted) < turn
            ranks.meet()
        return ahead

    assert together(region, work) == [False, False, False]


def test_a_rank_that_is_killed_ends_the_wait_of_the_others_by_name() -> None:
    region = Region(2)
    with child(lambda: region.rank(1).meet()) as pid:
        ranks = region.rank(0)
        ranks.meet()
        threading.Timer(0.05, lambda: (os.kill(pid, signal.SIGKILL), lose(region.address, 1))).start()
        with pytest.raises(RankIsLost, match="rank 1 is gone") as caught:
            ranks.meet()
        assert (caught.value.rank, caught.value.stuck) == (1, False)
        with pytest.raises(RankIsLost, match="rank 1 is gone"):
            ranks.meet()


def test_a_rank_that_stands_still_is_lost_after_the_bound_and_everybody_hears_it() -> None:
    region = Region(3, bound_s=0.2)

    def work(ranks: Collective, index: int) -> str:
        if index == 2:
            return ""
        with pytest.raises(RankIsLost) as caught:
            ranks.meet()
        return str(caught.value)

    assert together(region, work) == ["rank 2 is stuck", "rank 2 is stuck", ""]
    with pytest.raises(RankIsLost, match="rank 2 is stuck"):  # also for whom the others called lost
        region.rank(2).meet()


def test_a_rank_that_itself_waits_in_vain_is_not_the_one_that_is_lost() -> None:
    region = Region(3, bound_s=0.01)
    seat = region.address + SEAT * 2  # of rank 1, behind whoever is lost
    ctypes.c_int32.from_address(seat + AWAITS).value = 3  # it waits for rank 2
    with pytest.raises(RankIsLost, match="rank 2 is stuck"):
        region.rank(0).meet()
