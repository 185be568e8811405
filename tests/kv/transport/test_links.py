"""Channels of the gRPC transport to workers that left are given back; those in use stay."""

from __future__ import annotations

import asyncio

import pytest

from baton.kv.transport import grpc
from baton.kv.transport.grpc import GrpcTransport


def test_a_channel_that_no_stream_uses_any_more_is_closed_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "IDLE_S", 0.001, raising=False)

    async def main() -> None:
        transport = GrpcTransport()
        stays = await transport.connect("127.0.0.1:9")
        for port in range(10, 20):
            await (await transport.connect(f"127.0.0.1:{port}")).close()
        await asyncio.sleep(0.01)
        last = await transport.connect("127.0.0.1:20")
        assert set(transport._links) == {"127.0.0.1:9", "127.0.0.1:20"}
        for stream in (stays, last):
            await stream.close()
        await transport.close()

    asyncio.run(main())


def test_a_channel_is_kept_for_the_next_stream() -> None:
    async def main() -> None:
        transport = GrpcTransport()
        await (await transport.connect("127.0.0.1:9")).close()
        kept = transport._links["127.0.0.1:9"]
        again = await transport.connect("127.0.0.1:9")
        assert transport._links["127.0.0.1:9"] is kept
        await again.close()
        await transport.close()

    asyncio.run(main())
