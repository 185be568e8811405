"""A client of a gRPC stream that takes nothing of it, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.router.api.grpc import unread
from baton.router.api.grpc.decoding import with_decode_errors

CHUNK = bytes(1 << 16)


class Endless(grpc.GenericRpcHandler):
    """Streams without end; ``ended`` is set once a stream is over."""

    def __init__(self) -> None:
        self.ended, self.given = asyncio.Event(), 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return with_decode_errors(
            grpc.unary_stream_rpc_method_handler(self.stream, lambda raw: raw, lambda raw: raw)
        )

    async def stream(self, request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            while True:
                self.given += 1
                yield CHUNK
        finally:
            self.ended.set()


@pytest.mark.parametrize("reads", [False, True])
async def test_a_stream_of_which_nothing_is_taken_ends_and_one_that_is_read_goes_on(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread, "UNREAD_S", 3.0 if reads else 0.5)
    endless, server = Endless(), grpc.aio.server()
    server.add_generic_rpc_handlers((endless,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream("/any/Stream")(b"")
            if not reads:
                await asyncio.wait_for(endless.ended.wait(), 60)
                assert endless.given < 4096, "only what the windows hold was made"
                return
            until = asyncio.get_running_loop().time() + 1.5 * unread.UNREAD_S
            while asyncio.get_running_loop().time() < until:
                assert await asyncio.wait_for(call.read(), 60) == CHUNK
                await asyncio.sleep(0.02)  # as a client does that has something to do with what it reads
            assert not endless.ended.is_set()
            call.cancel()
            await asyncio.wait_for(endless.ended.wait(), 60)
    finally:
        await server.stop(None)
