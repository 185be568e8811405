"""What every transport in baton/kv/transport must do; a new file there needs a rig here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import baton.kv.transport
from baton.kv.transport.base import HandoffStream, Serve, Transport
from baton.kv.transport.grpc import SERVER_OPTIONS, GrpcTransport, handoff_handler
from baton.kv.transport.loopback import LoopbackTransport
from baton.protos.errors import WorkerLost

NOT_TRANSPORTS = {"__init__", "base", "frames", "control"}
NAMES = sorted({path.stem for path in Path(baton.kv.transport.__file__).parent.glob("*.py")} - NOT_TRANSPORTS)
Stop = Callable[[], Awaitable[None]]


async def grpc_rig(serve: Serve) -> tuple[Transport, str, Stop]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handoff_handler(serve),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return GrpcTransport(), f"127.0.0.1:{port}", lambda: server.stop(0)


async def loopback_rig(serve: Serve) -> tuple[Transport, str, Stop]:
    transport = LoopbackTransport({"here": serve})
    return transport, "here", transport.close


RIGS = {"grpc": grpc_rig, "loopback": loopback_rig}


class Peer:
    """A receiver that keeps what it got and can be told how to answer."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.ended = asyncio.Event()
        self.hold = asyncio.Event()
        self.hold.set()
        self.stop_after: int | None = None
        self.crash = False

    async def serve(self, frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        try:
            async for frame in frames:
                await self.hold.wait()
                self.got.append(frame)
                yield b"seen " + frame[:8]
                if self.crash:
                    raise RuntimeError("the receiver has a bug")
                if self.stop_after == len(self.got):
                    return
        finally:
            self.ended.set()


@pytest.fixture(params=NAMES)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Transport, str, Peer, Stop]]:
    assert request.param in RIGS, f"kv/transport/{request.param}.py has no rig in this test"
    peer = Peer()
    transport, address, stop = await RIGS[request.param](peer.serve)
    yield transport, address, peer, stop
    await transport.close()
    await stop()


Rig = tuple[Transport, str, Peer, Stop]


async def send_for_ever(stream: HandoffStream) -> None:
    while True:
        await stream.send(b"two")
        await asyncio.sleep(0.001)


async def failure(sending: asyncio.Future[Any]) -> BaseException | None:
    await asyncio.wait({sending})
    return sending.exception()


async def read_to_the_end(stream: HandoffStream) -> None:
    while await stream.receive() is not None:
        pass


async def test_frames_arrive_whole_in_order_and_answers_come_back(rig: Rig) -> None:
    transport, address, peer, _ = rig
    stream = await transport.connect(address)
    sent = [os.urandom(1 << size) for size in (0, 3, 10, 16, 20)]
    for frame in sent:
        await stream.send(frame)
        assert await stream.receive() == b"seen " + frame[:8]
    assert peer.got == sent
    await stream.close()


async def test_a_frame_of_many_megabytes_passes(rig: Rig) -> None:
    transport, address, peer, _ = rig
    stream = await transport.connect(address)
    frame = os.urandom(1 << 20) * 48
    await stream.send(frame)
    assert await stream.receive() == b"seen " + frame[:8]
    assert peer.got == [frame]
    await stream.close()


async def test_a_frame_is_a_copy(rig: Rig) -> None:
    transport, address, peer, _ = rig
    stream = await transport.connect(address)
    frame = os.urandom(100_000)
    await stream.send(frame)
    await stream.receive()
    assert peer.got[0] == frame
    assert peer.got[0] is not frame
    await stream.close()


async def test_the_receiver_may_end_the_stream(rig: Rig) -> None:
    transport, address, peer, _ = rig
    peer.stop_after = 1
    stream = await transport.connect(address)
    await stream.send(b"one")
    assert await stream.receive() == b"seen one"
    assert await stream.receive() is None
    with pytest.raises(WorkerLost):
        await send_for_ever(stream)
    await stream.close()


async def test_the_last_answer_reaches_a_sender_that_is_still_writing(rig: Rig) -> None:
    transport, address, peer, _ = rig
    for count in range(1, 11):
        peer.got.clear()
        peer.stop_after = count
        stream = await transport.connect(address)
        sending = asyncio.ensure_future(send_for_ever(stream))
        assert [await stream.receive() for _ in range(count)] == [b"seen two"] * count
        await stream.close()
        assert isinstance(await asyncio.wait_for(failure(sending), 2), WorkerLost)


async def test_a_closed_stream_ends_at_the_receiver_at_once(rig: Rig) -> None:
    transport, address, peer, _ = rig
    stream = await transport.connect(address)
    await stream.send(b"one")
    await stream.receive()
    await stream.close()
    await stream.close()
    await asyncio.wait_for(peer.ended.wait(), 2)


async def test_a_cancelled_sender_can_close_its_stream(rig: Rig) -> None:
    transport, address, peer, _ = rig
    peer.hold.clear()
    stream = await transport.connect(address)

    async def pour() -> None:
        try:
            while True:
                await stream.send(bytes(1 << 20))
        finally:
            await stream.close()

    pouring = asyncio.ensure_future(pour())
    await asyncio.sleep(0.1)
    assert not pouring.done(), "a slow receiver makes the sender wait"
    pouring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pouring
    await asyncio.wait_for(peer.ended.wait(), 2)


async def test_a_receiver_that_crashes_is_a_lost_worker(rig: Rig) -> None:
    transport, address, peer, _ = rig
    peer.crash = True
    stream = await transport.connect(address)
    await stream.send(b"one")
    with pytest.raises(WorkerLost):
        await read_to_the_end(stream)
    await stream.close()


async def test_nobody_at_the_address_is_a_lost_worker(rig: Rig) -> None:
    transport, *_ = rig

    async def call() -> None:
        stream = await transport.connect("127.0.0.1:1")
        await stream.send(b"one")
        await stream.receive()

    with pytest.raises(WorkerLost):
        await call()


async def test_a_receiver_that_goes_away_is_a_lost_worker(rig: Rig) -> None:
    transport, address, peer, stop = rig
    stream = await transport.connect(address)
    await stream.send(b"one")
    assert await stream.receive() == b"seen one"
    await stop()
    with pytest.raises(WorkerLost):
        await read_to_the_end(stream)
    await stream.close()
    await asyncio.wait_for(peer.ended.wait(), 2)


async def test_a_transport_that_closes_ends_its_streams_without_cancelling_their_users(rig: Rig) -> None:
    transport, address, peer, _ = rig
    stream = await transport.connect(address)
    await stream.send(b"one")
    assert await stream.receive() == b"seen one"
    reading = asyncio.ensure_future(stream.receive())
    await asyncio.sleep(0.01)
    await transport.close()
    assert isinstance(await asyncio.wait_for(failure(reading), 2), WorkerLost)
    await asyncio.wait_for(peer.ended.wait(), 2)


async def test_streams_side_by_side_dont_mix(rig: Rig) -> None:
    transport, address, _, _ = rig
    streams = [await transport.connect(address) for _ in range(8)]
    for number, stream in enumerate(streams):
        await stream.send(b"stream %d" % number)
    assert [await stream.receive() for stream in streams] == [b"seen stream %d" % n for n in range(8)]
    for stream in streams:
        await stream.close()
