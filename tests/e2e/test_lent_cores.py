"""A cluster of one machine whose workers lend one another cores: the same tokens, also when an engine is killed."""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.kernels.abi.cores import PAGE_BYTES, SEATS
from tests.e2e.fleet import DRAFT, Fleet, wait_for
from tests.e2e.test_ranks import ask, one_rank, prompt

SEAT = struct.Struct("=iiiiq")  # threads.cpp: Seat


def seats(fleet: Fleet) -> dict[int, tuple[int, int, bool]]:
    """Share, whether it decodes and whether it computes, of each engine that shares the machine's cores."""
    page = os.open(fleet.cores_page, os.O_RDONLY)
    try:
        found = [SEAT.unpack_from(os.pread(page, PAGE_BYTES, 0), at * PAGE_BYTES // SEATS) for at in range(SEATS)]
    finally:
        os.close(page)
    return {pid: (share, writes, at != 0) for pid, share, writes, _, at in found if pid}


def engines(fleet: Fleet) -> list[int]:
    return [fleet.record(f"{role}-0").engine_pid for role in ("prefill", "decode")]


@pytest.mark.thorough  # of engines without a cluster: tests/kernels/test_lent_cores.py
def test_answers_keep_their_tokens_and_a_killed_engine_keeps_no_core() -> None:
    tokens, share = prompt(3, 600), max(1, len(os.sched_getaffinity(0)) // 2)
    router = {"local_prefill_max_tokens": 0}
    with Fleet(1, 1, worker={"model": DRAFT}, router=router) as fleet, ThreadPoolExecutor(2) as threads:
        prefill, decode = engines(fleet)
        assert seats(fleet).keys() == {prefill, decode}
        expected = one_rank(tokens, 30)
        assert ask(fleet, tokens, 30)[0] == expected
        wait_for(lambda: seats(fleet) == {prefill: (share, 0, False), decode: (share, 1, False)}, what="rest")
        before = fleet.record("prefill-0").incarnation
        asked = threads.submit(ask, fleet, prompt(4, 1500), 200)
        wait_for(lambda: any(at for _, _, at in seats(fleet).values()), what="an engine that computes")
        fleet.kill("prefill-0", "engine")
        again = threads.submit(ask, fleet, tokens, 30)
        assert asked.result()[0] == one_rank(prompt(4, 1500), 200)
        assert again.result()[0] == expected
        fleet.wait_for_return("prefill-0", before)
        prefill, decode = engines(fleet)
        wait_for(
            lambda: seats(fleet) == {prefill: (share, 0, False), decode: (share, 1, False)}, what="its successor"
        )
        fleet.wait_for_baseline()
