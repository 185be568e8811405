"""A REST client that reads nothing of its answer, on a real socket."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from baton.cluster.config import RouterConfig
from baton.router import server

PIECE = bytes(1 << 16)
HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("streamed", [True, False])
async def test_who_reads_nothing_is_cut_off_and_what_was_held_for_it_is_free(
    monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.setattr(server, "UNREAD_S", 0.5)
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Answers for ever, or with 64 MiB at once, and waits until its client has left."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive_disconnect(receive))
        while streamed and not gone.done():
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            await asyncio.sleep(0)
        if not streamed:
            await send({"type": "http.response.body", "body": PIECE * 1024, "more_body": True})
        await gone
        left.set()

    config = RouterConfig(host="127.0.0.1", port=0, shutdown_grace_s=0.0)
    port, stop = await server._start_rest(config, app, None)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        await asyncio.get_running_loop().sock_sendall(client, HEAD)
        await asyncio.wait_for(left.wait(), 60)
    await stop()


async def receive_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
