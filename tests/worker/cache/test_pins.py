"""Pinned prefixes of one worker: within a bound, until their time is over, and never evicted before."""

from __future__ import annotations

import asyncio

import pytest

from baton.kv.exchange.warming import BlockKind, Warmer
from baton.kv.layout import prefix
from baton.protos.errors import Cancelled, InvalidRequest, PinsFull
from baton.protos.nouns import EngineRequest, Sampling
from baton.worker.cache.pins import PrefixPins
from tests.kv.sharers import LAYOUT, Sharer, settle


class Worker(Sharer):
    """A device of 32 pages, of which 8 may be pinned; ``other`` is where it fetches from."""

    def __init__(self, other: Sharer | None = None) -> None:
        super().__init__(32)

        async def blocks(address, hashes):
            async for page in other.source.fetch("m", hashes, LAYOUT):
                yield page

        fetcher = type("Fetcher", (), {"blocks": staticmethod(blocks)})() if other else None
        self.pins = PrefixPins(self.source, Warmer(self.filler, fetcher, BlockKind("f", "test")), 8, 16)

    def evict(self) -> None:
        self.pool.open([], self.pool.available).close()


def prompt(blocks: int, salt: int = 0, more: int = 0) -> EngineRequest:
    ids = tuple(range(salt, salt + 16 * blocks + more))
    return EngineRequest("r", ids, len(ids), Sampling())


def hashes(request: EngineRequest) -> list[bytes]:
    return prefix.block_hashes(prefix.root("f", "test"), request.token_ids)


async def test_a_pinned_prefix_stays_while_all_else_is_evicted_and_goes_once_it_is_unpinned():
    worker, kept, other = Worker(), prompt(4, more=5), prompt(4, salt=1000)
    worker.compute(hashes(kept))
    worker.compute(hashes(other))
    assert await worker.pins.pin("a", kept, 60.0) == 64
    worker.evict()
    assert (worker.pool.match(hashes(kept)), worker.pool.match(hashes(other))) == (4, 0)
    assert worker.pins.unpin("a")
    assert not worker.pins.unpin("a")
    await settle()
    worker.evict()
    assert worker.pool.match(hashes(kept)) == 0
    worker.pool.check()


async def test_a_pin_ends_at_its_time_and_a_second_request_renews_it():
    worker, kept = Worker(), prompt(3)
    worker.compute(hashes(kept))
    await worker.pins.pin("a", kept, 600.0)
    assert await worker.pins.pin("a", kept, 0.01) == 48
    async with asyncio.timeout(20):
        while len(worker.sharing):
            await asyncio.sleep(0.005)
    worker.evict()
    assert worker.pool.match(hashes(kept)) == 0


async def test_what_goes_beyond_the_bound_is_refused_by_name_before_anything_is_pinned():
    worker = Worker()
    for name, salt in (("a", 0), ("b", 1000)):
        worker.compute(hashes(prompt(4, salt)))
        await worker.pins.pin(name, prompt(4, salt), 60.0)
    with pytest.raises(PinsFull, match="of 8 that may be") as refused:
        await worker.pins.pin("c", prompt(1, 2000), 60.0)
    assert refused.value.param == "worker.pinned_share"
    assert len(worker.sharing) == 2
    for bad, ttl in ((prompt(0, more=9), 60.0), (prompt(1), 0.0), (prompt(1), 1e9), (prompt(1), float("nan"))):
        with pytest.raises(InvalidRequest):
            await worker.pins.pin("d", bad, ttl)


async def test_what_is_not_here_is_fetched_and_pinned():
    source = Sharer(32)
    worker, kept = Worker(source), prompt(6)
    source.compute(hashes(kept))
    assert await worker.pins.pin("a", kept, 60.0, "there") == 96
    worker.evict()
    assert worker.pool.match(hashes(kept)) == 6


async def test_what_nobody_has_is_not_pinned():
    worker = Worker()
    assert await worker.pins.pin("a", prompt(4), 60.0) == 0


async def test_a_pin_that_is_let_go_before_the_engine_has_answered_does_not_stay():
    worker, kept = Worker(), prompt(4)
    worker.compute(hashes(kept))
    pinning = asyncio.create_task(worker.pins.pin("a", kept, 60.0))
    await asyncio.sleep(0)
    assert worker.pins.unpin("a")
    with pytest.raises(Cancelled):
        await pinning
    await settle()
    assert len(worker.sharing) == 0
    assert await worker.pins.pin("a", kept, 60.0) == 64
