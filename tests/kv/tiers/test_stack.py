"""Lifting from lower tiers beside decoding: gently, but never so gently that the request gives up on it."""

from __future__ import annotations

import asyncio
import itertools

from baton.kv.tiers.memory import host_slab
from baton.kv.tiers.stack import BATCH, BESIDE_DECODE, Tier, Tiers

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
