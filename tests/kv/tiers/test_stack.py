"""Lifting from lower tiers beside decoding: gently, but never so gently that the request gives up on it."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import ClassVar

from baton.kv.tiers import stack
from baton.kv.tiers.memory import host_slab
from baton.kv.tiers.stack import BATCH, BESIDE_DECODE, PIECE_BYTES, Tier, Tiers

PAGE = 256


async def test_a_batch_that_waited_a_minute_for_a_core_is_not_paid_for_in_minutes():
    slab = host_slab(40 * (PAGE + 64), PAGE)
    assert slab is not None
    minutes = itertools.count(0, 60)
    tiers = Tiers([Tier("host", slab)], clock=lambda: float(next(minutes)))
    blocks = [bytes([number]) * 32 for number in range(2 * BATCH)]
    pages = [memoryview(bytearray([number]) * PAGE) for number in range(2 * BATCH)]
    await tiers.store(blocks, pages)
    tiers.duty = BESIDE_DECODE
    lifted = [memoryview(bytearray(PAGE)) for _ in blocks]
    async with asyncio.timeout(20):
        counts = [count async for count in tiers.load(blocks, lifted)]
    assert counts == [BATCH, BATCH]
    assert lifted == pages
    tiers.close()


class Watching(Tier):
    """Says how many blocks each piece has, and whether one ever began before another ended."""

    pieces: ClassVar[list[int]] = []  # of all tiers of a test
    running = 0
    free = False  # to run beside one another

    async def run(self, work, *args):
        Watching.pieces.append(len(args[0]))
        Watching.running += 1
        assert Watching.running == 1 or self.free, "two copies at once"
        try:
            return await super().run(work, *args)
        finally:
            Watching.running -= 1


def watched(page: int, slots: int, clock) -> Tiers:
    Watching.pieces, Watching.running = [], 0
    made = []
    for name in ("host", "disk"):
        slab = host_slab(slots * (page + 64), page)
        assert slab is not None
        made.append(Watching(name, slab))
    return Tiers(made, clock)


async def test_beside_decode_pages_are_copied_in_small_pieces_one_at_a_time_whichever_way_they_go():
    page = PIECE_BYTES // 4
    tiers = watched(page, 24, lambda: 0.0)
    old, new = ([bytes([first + number]) * 32 for number in range(12)] for first in (0, 100))
    pages = [memoryview(bytearray([number]) * page) for number in range(12)]
    Watching.free = True
    await tiers.store(old, pages)
    assert Watching.pieces == [12, 12], "at full speed all at once, all tiers at once"
    Watching.pieces, Watching.free = [], False
    tiers.duty = BESIDE_DECODE
    lifted = [memoryview(bytearray(page)) for _ in old]

    async def lift() -> list[int]:
        return [count async for count in tiers.load(old, lifted)]

    counts, _ = await asyncio.gather(lift(), tiers.store(new, pages))
    assert counts == [4, 4, 4]
    assert (lifted, tiers.drain_gone()) == (pages, set())
    assert Watching.pieces == [4] * 9
    assert all(tiers.everywhere(block) for block in (*old, *new))
    tiers.close()


async def test_the_copies_share_of_the_time_is_bounded_over_lifts_and_write_backs_together():
    milliseconds = itertools.count()
    tiers = watched(PAGE, 40, lambda: next(milliseconds) / 1000)  # each piece takes one
    tiers.duty = 0.1
    blocks = [bytes([number]) * 32 for number in range(BATCH)]
    pages = [memoryview(bytearray(PAGE)) for _ in blocks]
    began = time.monotonic()
    await tiers.store(blocks, pages)
    assert [count async for count in tiers.load(blocks, pages)] == [BATCH]
    assert len(Watching.pieces) == 3
    assert time.monotonic() - began >= 3 * 0.009
    tiers.close()


async def test_pauses_that_no_timer_can_keep_add_up_first(monkeypatch):
    micros, slept = itertools.count(0, 20), list[float]()
    tiers = watched(PAGE, 40, lambda: next(micros) / 1e6)
    tiers.duty = 0.5
    blocks, pages = [b"a" * 32], [memoryview(bytearray(PAGE))]

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(stack.asyncio, "sleep", sleep)
    for _ in range(60):  # a piece per tier, of 20 us each
        await tiers.store(blocks, pages)
    assert len(slept) == 1
    assert stack.LEAST_PAUSE_S <= slept[0] < 2 * stack.LEAST_PAUSE_S
    tiers.close()
