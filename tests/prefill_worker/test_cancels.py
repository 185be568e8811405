"""A prompt's whole way through the I/O process, cancelled wherever it waits: the engine hears its end once."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.prefill_worker.io.handoff_frames import Sender
from baton.prefill_worker.io.service import DecodePeers, PrefillCall, PrefillService
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, KvLayout, Sampling
from tests.cancels import ALL, TWICE, Play, enumerate_cancels
from tests.kv.transport.rigs import RIGS
from tests.kv.transport.test_handoffs import BLOCKS, FINGERPRINT, FIRST, LAYOUT, LEASE, Pair, until

TOKENS = tuple(range(16 * BLOCKS - 3))


class Engine:
    """Computes a block a turn of the loop, until it is told to stop."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.heard = pair, Counter[str]()
        self.stopped: set[int] = set()
        self.service: PrefillService

    def send(self, message: Any) -> None:
        self.heard[type(message).__name__] += 1
        if isinstance(message, ch.Prefill):
            asyncio.get_running_loop().call_soon(self._compute, message.key, 0)
        else:
            self.stopped.add(message.key)

    def _compute(self, key: int, block: int) -> None:
        if key in self.stopped:
            return
        if block == BLOCKS:
            self.service.take(ch.PrefillDone(key, FIRST, 0, (), (), b"", 0.0))
            return
        self.service.take(ch.BlocksReady(key, tuple(self.pair.ship(block))))
        asyncio.get_running_loop().call_soon(self._compute, key, block + 1)


@asynccontextmanager
async def prefill(rig: str) -> AsyncIterator[Play]:
    pair, engine = Pair(), None
    with tempfile.TemporaryDirectory() as folder:
        pair.rig = await RIGS[rig](pair.intake.accept, pair.source, Path(folder))
        pair.admit()
        engine = Engine(pair)

        async def layout_of(address: str) -> KvLayout:
            await asyncio.sleep(0)
            return LAYOUT

        sender, clock = Sender("p0", "m", FINGERPRINT, LAYOUT), asyncio.get_running_loop().time
        engine.service = service = PrefillService(
            engine.send, pair.source, sender, pair.rig.transport, clock, DecodePeers(layout_of=layout_of)
        )
        request = EngineRequest("r", TOKENS, len(TOKENS), Sampling(max_tokens=4))
        call = PrefillCall(request, "m", pair.rig.address, LEASE, 1, 0)

        async def at_rest() -> None:
            assert service.active == 0
            assert engine.heard["Prefill"] <= engine.heard["SendClosed"] <= 1  # none where it never began
            await until(lambda: not pair.intake.open_streams)
            await pair.end()

        yield Play(partial(service.prefill, call), at_rest, None, [(pair.pool, pair.memory)])
        await pair.rig.transport.close()
        await pair.rig.stop()


@pytest.mark.parametrize("rig", ["loopback", "tcp, 3 lanes"])
async def test_a_prompt_that_is_cancelled_twice_is_over_once(rig: str) -> None:
    assert await enumerate_cancels(partial(prefill, rig), [TWICE], every=3)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rig", ["loopback", "tcp", "tcp, 3 lanes", "shm", "grpc"])
async def test_a_prompt_may_be_cancelled_at_every_await(rig: str) -> None:
    assert await enumerate_cancels(partial(prefill, rig), ALL)
