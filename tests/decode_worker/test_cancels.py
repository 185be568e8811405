"""A router's session with a decode worker, cancelled wherever it waits: the engine hears of every request's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.service import DecodeService
from baton.decode_worker.io.shell import DecodeShell
from baton.kv.exchange.filling import NOTHING
from baton.kv.memory.host_pages import PageMemory
from baton.protos import channel as ch
from baton.protos.nouns import PROTOCOL, TokenRun
from baton.protos.v1 import common_pb2 as c
from baton.protos.v1 import worker_pb2 as w
from tests.cancels import ALL, TWICE, Play, enumerate_cancels
from tests.kv.sharers import LAYOUT, PAGE
from tests.router.fake_services import info
from tests.router.fake_workers import until


class Engine:
    """Admits, writes four tokens to a local request, and counts who is here."""

    def __init__(self) -> None:
        self.here: set[int] = set()
        self.gone: set[int] = set()
        self.service: DecodeService

    def send(self, message: Any) -> None:
        asyncio.get_running_loop().call_soon(self._take, message)

    def _take(self, message: Any) -> None:
        if isinstance(message, ch.Admit):
            if message.key in self.gone:
                return
            self.here.add(message.key)
            admitted = ch.Admitted(message.key, bytes([message.key]) * 16, 1, 0, (message.key,), (b"h" * 32,))
            self.service.take(admitted)
            if message.local:
                asyncio.get_running_loop().call_soon(self._write, message.key, 0)
        elif isinstance(message, ch.Cancel):
            self.here.discard(message.key)
            self.service.take(ch.Ended(message.key, None))

    def _write(self, key: int, index: int) -> None:
        if key not in self.here:
            return
        run = TokenRun(index, (7,), finish_reason="length" if index == 3 else "")
        self.service.take(ch.Tokens(index, (ch.Output(key, run, 0),)))
        if run.finish_reason:
            self.here.discard(key)
        else:
            asyncio.get_running_loop().call_soon(self._write, key, index + 1)


class SlowWarmer:
    has_tiers = True

    async def warm(self, request: Any, *_: Any) -> Any:
        for _ in range(3):
            await asyncio.sleep(0)
        return NOTHING


@asynccontextmanager
async def session() -> AsyncIterator[Play]:
    engine = Engine()
    intake = Intake(PageMemory.create(4, PAGE), LAYOUT, "f", engine.send)
    warmer: Any = SlowWarmer()
    engine.service = service = DecodeService(engine.send, intake, "m", 30.0, warmer)
    shell = DecodeShell(service, lambda: info("d0", "decode"))

    async def incoming() -> AsyncIterator[w.SessionUp]:
        yield w.SessionUp(hello=w.Hello(router_id="r", protocol=PROTOCOL))
        for name, local in (("a", True), ("b", False), ("c", True)):
            sampling = c.Sampling(max_tokens=4)
            admit = w.Admit(request_id=name, token_ids=[1, 2], prompt_tokens=2, sampling=sampling, local=local)
            yield w.SessionUp(admit=admit)
            await asyncio.sleep(0)
        await asyncio.sleep(3600)

    async def run() -> None:
        finished = 0
        async with aclosing(shell.Session(incoming(), None)) as items:  # type: ignore[type-var]
            async for item in items:
                finished += sum(bool(output.run.finish_reason) for output in item.tokens.outputs)
                if finished == 2:
                    return

    async def at_rest() -> None:
        await until(lambda: not (engine.here or service._warming))
        assert (service.active, intake.open_streams, len(service._sessions)) == (0, 0, 0)
        assert intake.lease(bytes([2]) * 16) is None, "nothing may be received for a request that is gone"

    yield Play(run, at_rest)


async def test_a_session_that_is_cancelled_twice_leaves_no_request_behind() -> None:
    assert await enumerate_cancels(session, [TWICE], every=2)


@pytest.mark.thorough
async def test_a_session_may_be_cancelled_at_every_await() -> None:
    assert await enumerate_cancels(session, ALL)
