"""The sending side of a handoff, against the real receiver over each transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import msgspec
import pytest

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import shm, tcp
from baton.kv.transport.grpc import SERVER_OPTIONS, GrpcTransport, handoff_handler
from baton.kv.transport.loopback import LoopbackTransport
from baton.kv.wire import frames
from baton.kv.wire.base import Transport
from baton.kv.wire.frames import Frame, Kind
from baton.prefill_worker.io import handoff as handoff_module
from baton.prefill_worker.io.handoff import Handoff, HandoffReport
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.protos.channel import BlocksReceived, Commit, ReceiveClosed, ReceiveOpened
from baton.protos.errors import LeaseUnknown, StaleEpoch, WorkerLost
from tests.prefill_worker.io.handoff_rig import (
    BLOCKS,
    FINGERPRINT,
    FIRST,
    LAYOUT,
    LEASE,
    Clock,
    Source,
    receiver,
    transport,
    until,
)

__all__ = ["receiver", "transport"]


# ---- against the real receiver -------------------------------------------------------------------------


class Decode:
    """A decode worker's intake, with an engine that commits at once."""

    def __init__(self) -> None:
        self.memory = PageMemory.create(BLOCKS + 2, LAYOUT.page_bytes)
        self.told: list[msgspec.Struct] = []
        self.intake = Intake(self.memory, LAYOUT, FINGERPRINT, self.tell)
        self.pages = list(range(1, BLOCKS + 1))

    def tell(self, message: msgspec.Struct) -> None:
        self.told.append(message)
        if isinstance(message, Commit):
            self.intake.on_committed(message.key, message.epoch)

    def received(self) -> list[bytes]:
        return [bytes(self.memory.page(page)) for page in self.pages]


@pytest.fixture(params=["grpc", "loopback", "tcp", "shm"])
async def decode(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[Decode, Transport, str, Source]]:
    """The receiver, a transport of each kind to it, its address, and the sender's pages."""
    decode, source, name = Decode(), Source(), request.param
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handoff_handler(decode.intake.accept),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    data, address = tcp.listen("127.0.0.1", decode.intake.accept)
    local, path = shm.listen(str(tmp_path / "kv"), decode.intake.accept)
    transport: Transport
    transport, address = {
        "grpc": lambda: (GrpcTransport(), f"127.0.0.1:{port}"),
        "loopback": lambda: (LoopbackTransport({"d0": decode.intake.accept}), "d0"),
        "tcp": lambda: (tcp.TcpTransport(), address),
        "shm": lambda: (shm.ShmTransport(source.memory), path),
    }[name]()
    yield decode, transport, address, source
    await transport.close()
    await server.stop(0)
    data.close()
    local.close()


async def begun(decode: tuple[Decode, Transport, str, Source], count: int) -> asyncio.Future[HandoffReport]:
    """Begins a handoff, and returns its run once the first ``count`` blocks have arrived."""
    there, transport, address, source = decode
    there.intake.register(IntakeLease(7, LEASE, 1, there.pages, source.hashes, 0))
    handoff = source.handoff(transport, address)
    handoff.ship(source.blocks[:count])
    running = asyncio.ensure_future(handoff.run())
    await until(lambda: there.intake.received_blocks == count)
    return running


async def test_a_prompt_arrives_byte_for_byte(decode: tuple[Decode, Transport, str, Source]) -> None:
    there, transport, address, source = decode
    there.intake.register(IntakeLease(7, LEASE, 1, there.pages, source.hashes, 0))
    handoff = source.handoff(transport, address)
    handoff.ship(source.blocks)
    handoff.commit(FIRST, 32)
    await asyncio.wait_for(handoff.run(), 30)
    assert there.received() == [bytes(source.memory.page(block.page)) for block in source.blocks]
    assert there.told[0] == ReceiveOpened(7, 1)
    assert there.told[-2:] == [Commit(7, 1, FIRST, 32), ReceiveClosed(7, 1)]
    arrived = [i for message in there.told if isinstance(message, BlocksReceived) for i in message.blocks]
    assert arrived == list(range(BLOCKS))


async def test_a_lease_that_ends_midway_is_heard_at_once(decode: tuple[Decode, Transport, str, Source]) -> None:
    there, running = decode[0], await begun(decode, 2)
    there.intake.close(7)
    assert there.told[-1] == ReceiveClosed(7, 1)
    with pytest.raises(LeaseUnknown):
        await asyncio.wait_for(running, 30)


async def test_a_sender_that_is_cancelled_lets_go_of_the_receivers_pages(
    decode: tuple[Decode, Transport, str, Source],
) -> None:
    there, running = decode[0], await begun(decode, 2)
    running.cancel()
    await asyncio.wait({running})
    await until(lambda: there.told[-1] == ReceiveClosed(7, 1))


async def test_a_second_prefill_finishes_what_the_first_began(
    decode: tuple[Decode, Transport, str, Source],
) -> None:
    there, transport, address, source = decode
    running = await begun(decode, 4)
    there.intake.rearm(7, 2)
    with pytest.raises(StaleEpoch):
        await asyncio.wait_for(running, 30)
    sender = Sender("p1", "m", FINGERPRINT, LAYOUT)
    second = Handoff(transport, source.memory, sender, Destination(address, LEASE, 2, "r", BLOCKS, 13), Clock())
    second.ship(source.blocks[4:])
    second.commit(FIRST, 0)
    await asyncio.wait_for(second.run(), 30)
    assert there.received() == [bytes(source.memory.page(block.page)) for block in source.blocks]


class Broken:
    """A stream whose sends fail from the ``fails_at``-th on, at our end alone; it answers once it is told to."""

    def __init__(self, fails_at: int) -> None:
        self.sent: list[Frame] = []
        self.replies: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed = False
        self._fails_at = fails_at

    async def connect(self, address: str) -> Broken:
        return self

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        self.sent.append(frame)
        if len(self.sent) >= self._fails_at:
            raise WorkerLost("no buffer space available", "decode_address")

    async def receive(self) -> bytes | None:
        return await self.replies.get()

    async def close(self) -> None:
        self.closed = True


async def test_a_stream_that_breaks_at_our_end_alone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.prefill_worker.io.handoff.LAST_WORDS_S", 0.05)
    stream, source = Broken(fails_at=2), Source()
    handoff = source.handoff(stream)
    handoff.ship(source.blocks)
    with pytest.raises(WorkerLost, match="no buffer space"):
        await asyncio.wait_for(handoff.run(), 30)
    assert stream.closed


async def test_a_receiver_that_took_everything_over_is_believed_though_a_send_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handoff_module, "LAST_WORDS_S", 3600.0)  # which nobody waits for here
    stream, source = Broken(fails_at=3), Source()
    handoff = source.handoff(stream)
    handoff.ship(source.blocks)
    handoff.commit(FIRST, 0)
    running = asyncio.ensure_future(handoff.run())
    while not any(frame.kind is Kind.COMMIT for frame in stream.sent):
        await asyncio.sleep(0)
    for frame in stream.sent:
        stream.replies.put_nowait(frames.ack(frame, range(BLOCKS) if frame.kind is Kind.BLOCK else ()))
    report = await asyncio.wait_for(running, 30)
    assert report.shipped_blocks == BLOCKS
