"""The listeners themselves, with real sockets; what they serve is tested elsewhere."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from baton.cluster.config import RouterConfig
from baton.router import server
from baton.router.api.sse import EventStream


async def test_a_client_that_takes_nothing_of_its_answer_is_cut_off_and_its_request_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "UNREAD_S", 0.5)
    closed = asyncio.Event()

    async def events():
        while True:
            await asyncio.sleep(0)
            yield "x" * 100_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await EventStream(events(), closed.set, {})(scope, receive, send)

    port, stop = await server._start_rest(RouterConfig(host="127.0.0.1", port=0), app, None)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(closed.wait(), 60)
    await stop()
