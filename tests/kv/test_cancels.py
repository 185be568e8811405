"""Everything of kv/ that waits, cancelled wherever it does, and again: no page is lost, or written by two."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.kv.exchange.fetch import BlockFetcher
from baton.kv.exchange.source import FetchedPage
from baton.kv.tiers.slab import copying as slab_copying
from baton.kv.tiers.stack import BESIDE_DECODE
from baton.kv.transport.auto import AutoTransport
from baton.protos.channel import Commit
from baton.protos.nouns import WorkerInfo
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.worker.control import WorkerShell
from tests.cancels import ALL, TWICE, Gate, Play, Scenario, enumerate_cancels
from tests.kv.sharers import LAYOUT, Sharer, chain, settle
from tests.kv.tiers.test_writeback import CHAIN, Tiered
from tests.kv.transport.rigs import RIGS
from tests.kv.transport.test_handoffs import BLOCKS, FIRST, Pair, until
from tests.kv.transport.test_handoffs import LAYOUT as WIDE

# ---- lower tiers ---------------------------------------------------------------------------------------


@asynccontextmanager
async def tiered(tier: str, gate: Gate) -> AsyncIterator[Tiered]:
    """The first 20 blocks are below, and most of them no more on the device; each copy passes the gate."""
    copy = slab_copying.copy
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"host": 60} if tier == "host" else {"host": 0, "disk": 60, "folder": Path(folder)}
        worker = Tiered(pages=24, **sizes)  # type: ignore[arg-type]
        for known in (CHAIN[:20], chain(22, salt=1)):
            worker.compute(known)
            await worker.rest()
        gate.before(slab_copying, "copy")
        try:
            yield worker
        finally:
            slab_copying.copy = copy
            await worker.close()


async def rests(worker: Sharer) -> None:
    """Asserts that nothing is held and that whatever can be found is right."""
    await until(worker.at_baseline)
    for known in (CHAIN, chain(22, salt=1)):
        worker.holds(known)


@asynccontextmanager
async def lift(tier: str, duty: float) -> AsyncIterator[Play]:
    gate = Gate()
    async with tiered(tier, gate) as worker:
        worker.tiers.duty = duty
        yield Play(lambda: worker.lift(CHAIN[:20]), partial(rests, worker), gate, [(worker.pool, worker.memory)])


@asynccontextmanager
async def write_back(tier: str, duty: float) -> AsyncIterator[Play]:
    gate = Gate()
    async with tiered(tier, gate) as worker:
        worker._task.cancel()
        await asyncio.wait({worker._task})
        worker.tiers.duty = duty
        worker.compute(chain(6, salt=2))
        worker.report()

        async def again() -> None:
            while worker.writeback._queue:
                await worker.writeback._batch()

        yield Play(again, partial(rests, worker), gate, [(worker.pool, worker.memory)])


# ---- blocks of others ----------------------------------------------------------------------------------


@asynccontextmanager
async def fill() -> AsyncIterator[Play]:
    holder, asker = Sharer(), Sharer()
    holder.compute(CHAIN[:8])

    async def slow(hashes: tuple[bytes, ...]) -> AsyncGenerator[FetchedPage, None]:
        async for page in holder.source.fetch("m", hashes, LAYOUT):
            await asyncio.sleep(0)
            yield page

    async def at_rest() -> None:
        await rests(asker)
        await rests(holder)

    yield Play(lambda: asker.filler.fill(CHAIN[:8], slow), at_rest, None, [(asker.pool, asker.memory)])


@asynccontextmanager
async def fills_of_the_same_blocks() -> AsyncIterator[Play]:
    """The one that is cancelled waits for another that brings them."""
    holder, asker = Sharer(), Sharer()
    holder.compute(CHAIN[:4])

    async def blocks(hashes: tuple[bytes, ...]) -> AsyncGenerator[FetchedPage, None]:
        async for page in holder.source.fetch("m", hashes, LAYOUT):
            yield page

    other = asyncio.create_task(asker.filler.fill(CHAIN[:4], blocks))
    await asyncio.sleep(0)

    async def at_rest() -> None:
        await other
        await settle()
        assert asker.holds(CHAIN) == 4
        await rests(asker)
        await rests(holder)

    yield Play(lambda: asker.filler.fill(CHAIN[:4], blocks), at_rest, None, [(asker.pool, asker.memory)])


@asynccontextmanager
async def fetch() -> AsyncIterator[Play]:
    """The same over a worker's own Fetch call."""
    holder, asker, server = Sharer(), Sharer(), grpc.aio.server()
    holder.compute(CHAIN[:8])
    control: Any = None
    stubs.add_WorkerServicer_to_server(WorkerShell(control, holder.source), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    fetcher = BlockFetcher("m", LAYOUT)

    async def at_rest() -> None:
        await rests(asker)
        await rests(holder)

    work = partial(asker.filler.fill, CHAIN[:8], partial(fetcher.blocks, address))
    yield Play(work, at_rest, None, [(asker.pool, asker.memory)])
    await fetcher.close()
    await server.stop(0)


# ---- handoffs ------------------------------------------------------------------------------------------


@asynccontextmanager
async def handoff(rig: str, aborts: bool = False) -> AsyncIterator[Play]:
    """Sends and receives a handoff; what was verified stays right though the sender's pages are others' by then."""
    pair = Pair()
    with tempfile.TemporaryDirectory() as folder:
        pair.rig = await RIGS[rig](pair.intake.accept, pair.source, Path(folder))
        pair.admit()
        sent, claim = pair.sent(), pair.intake._by_key[1]
        work = pair.handoff()
        work._frame_bytes = 4 * WIDE.page_bytes
        work.ship(pair.ship(*range(BLOCKS - 2 * aborts)))
        if not aborts:
            work.commit(FIRST, 0)

        async def run() -> None:
            try:
                if aborts:
                    asyncio.get_running_loop().call_later(0.01, pair.intake.close, 1)
                await work.run()
            except Exception:
                assert aborts
            finally:
                pair.source.view()[:] = bytes(len(pair.source.view()))  # the engine has its pages back

        async def at_rest() -> None:
            await until(lambda: not claim.open_streams)
            assert not sum(link.streams for link in getattr(pair.rig.transport, "_links", {}).values())
            for index in claim.received:
                assert bytes(pair.memory.page(pair.lease.pages[index])) == sent[index]
            assert len(claim.received) == BLOCKS or not any(isinstance(m, Commit) for m in pair.told)
            await pair.end()

        yield Play(run, at_rest, None, [(pair.pool, pair.memory)])
        await pair.rig.transport.close()
        await pair.rig.stop()


@asynccontextmanager
async def preflight(rig: str) -> AsyncIterator[Play]:
    """A stream by the way that was measured for it, opened and closed."""
    pair = Pair()
    with tempfile.TemporaryDirectory() as folder:
        pair.rig = await RIGS[rig](pair.intake.accept, pair.source, Path(folder))
        offered = {rig: pair.rig.address}

        async def describe(address: str) -> WorkerInfo:
            await asyncio.sleep(0)
            return WorkerInfo("d0", "i", "decode", address, "m", "f", WIDE, 1, 1, (), 1, data_addresses=offered)

        auto = AutoTransport(pair.source, time.monotonic, rig, describe=describe, host_id="h")

        async def connect() -> None:
            stream = await auto.connect("here")
            await stream.close()

        async def at_rest() -> None:
            await connect()  # the choice is still made, or is made again
            await auto.close()
            pair.admit()
            await pair.end()

        yield Play(connect, at_rest)
        await pair.rig.transport.close()
        await pair.rig.stop()


SCENARIOS: dict[str, Scenario] = {
    "lift from the host": partial(lift, "host", 1.0),
    "lift from the disk": partial(lift, "disk", 1.0),
    "lift beside decode": partial(lift, "host", BESIDE_DECODE),
    "write back": partial(write_back, "host", 1.0),
    "write back to the disk": partial(write_back, "disk", 1.0),
    "write back beside decode": partial(write_back, "host", BESIDE_DECODE),
    "fill": fill,
    "fetch": fetch,
    "fills of the same blocks": fills_of_the_same_blocks,
    **{f"handoff by {rig}": partial(handoff, rig) for rig in RIGS},
    **{f"handoff by {rig} that is refused": partial(handoff, rig, True) for rig in RIGS},
    **{f"preflight by {rig}": partial(preflight, rig) for rig in ("tcp", "shm", "grpc")},
}
SAMPLE = {"lift from the host", "write back to the disk", "fill", "handoff by tcp, 3 lanes", "handoff by grpc"}


@pytest.mark.parametrize("name", sorted(SAMPLE))
async def test_a_second_cancel_while_the_first_is_heeded_loses_nothing(name: str) -> None:
    assert await enumerate_cancels(SCENARIOS[name], [TWICE], every=3)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_cancels_at_every_await_lose_nothing(name: str) -> None:
    assert await enumerate_cancels(SCENARIOS[name], ALL)
