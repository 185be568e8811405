"""Tests what every transport in baton/kv/transport must do; a new file there needs a rig in rigs.py."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from baton.kv.memory import block_sums
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import grpc, names
from baton.kv.wire import frames, incoming
from baton.kv.wire.base import HandoffStream, ReplyStream, Transport
from baton.kv.wire.frames import Block, Frame, Kind
from baton.protos.errors import BatonError, WorkerLost
from tests.kv.transport.rigs import RIGS

PAGE = 1 << 20
PAGES = 56
PICKERS = {"auto"}  # these have streams of the others
Stop = Callable[[], Awaitable[None]]


def note(text: bytes) -> Frame:
    """A frame without blocks."""
    return Frame(Kind.OPEN, body=text)


class Peer:
    """A receiver that keeps what it got and can be told how to answer."""

    def __init__(self) -> None:
        self.got: list[Frame] = []
        self.bodies: list[bytes] = []
        self.blocks: list[bytes] = []
        self.ended = asyncio.Event()
        self.reading = True
        self.stop_after: int | None = None
        self.crash = False
        self.errors: list[BatonError] = []

    def accept(self, line: ReplyStream) -> PeerSink:
        return PeerSink(self, line)


class PeerSink:
    """One stream to a Peer."""

    def __init__(self, peer: Peer, line: ReplyStream) -> None:
        self.peer, self.line, self.taken = peer, line, 0
        self.places: dict[int, list[memoryview]] = {}  # by frame: lanes of a stream are placed side by side

    def take(self, frame: Frame) -> None:
        self.taken += 1
        self.peer.got.append(frame)
        self.peer.bodies.append(bytes(frame.body))
        self.line.reply(frames.encode(Frame(Kind.ACK, body=bytes(frame.body)[:8], sequence=len(self.peer.got))))
        if self.peer.crash:
            raise RuntimeError("the receiver has a bug")
        if self.peer.stop_after == self.taken:
            self.line.end()

    def place(self, frame: Frame) -> Sequence[memoryview] | None:
        self.places[id(frame)] = [memoryview(bytearray(frame.unit)) for _ in frame.blocks]
        return self.places[id(frame)]

    def landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        assert list(checksums) == [block.checksum for block in frame.blocks]
        self.peer.blocks += [bytes(place) for place in self.places.pop(id(frame))]
        self.take(frame)

    def over(self, error: BatonError | None) -> None:
        self.peer.errors += [] if error is None else [error]
        self.peer.ended.set()
        self.line.end()


class Rigged:
    """A transport under test."""

    def __init__(self, transport: Transport, address: str, peer: Peer, stop: Stop, memory: PageMemory) -> None:
        self.transport, self.address, self.peer, self.stop, self.memory = transport, address, peer, stop, memory

    async def connect(self) -> HandoffStream:
        return await self.transport.connect(self.address)

    def pages(self, *numbers: int, unit: int = PAGE) -> tuple[Frame, list[memoryview]]:
        """A frame with those pages' first ``unit`` bytes."""
        payload = [self.memory.page(number)[:unit] for number in numbers]
        table = tuple(Block(n, bytes(32), block_sums.checksum(p)) for n, p in zip(numbers, payload, strict=True))
        offsets = tuple(number * PAGE for number in numbers)
        return Frame(Kind.BLOCK, unit=unit, blocks=table, offsets=offsets), payload


@pytest.fixture(scope="module")
def memory() -> PageMemory:
    made = PageMemory.create(PAGES, PAGE)
    made.view()[:] = os.urandom(PAGE) * PAGES
    for page in range(PAGES):
        made.page(page)[:4] = struct.pack("<I", page)
    return made


@pytest.fixture(params=RIGS)
async def rig(request: pytest.FixtureRequest, memory: PageMemory, tmp_path: Path) -> AsyncIterator[Rigged]:
    peer = Peer()
    made = await RIGS[request.param](peer.accept, memory, tmp_path)
    yield Rigged(made.transport, made.address, peer, made.stop, memory)
    await made.transport.close()
    await made.stop()


def test_every_transport_has_a_rig() -> None:
    missing = set(names()) - PICKERS - set(RIGS)
    assert not missing, f"kv/transport/{missing}.py has no rig"


async def answer(stream: HandoffStream) -> bytes:
    raw = await asyncio.wait_for(stream.receive(), 30)
    assert raw is not None
    return bytes(frames.decode(raw).body)


async def send_for_ever(stream: HandoffStream) -> None:
    while True:
        await stream.send(note(b"two"))
        await asyncio.sleep(0.001)


async def failure(sending: asyncio.Future[Any]) -> BaseException | None:
    await asyncio.wait({sending})
    return sending.exception()


async def read_to_the_end(stream: HandoffStream) -> None:
    while await stream.receive() is not None:
        pass


async def test_checksums_that_are_left_to_the_transport_are_those_of_the_bytes(rig: Rigged) -> None:
    frame, payload = rig.pages(3, 0, 5)
    left = msgspec.structs.replace(frame, blocks=tuple(Block(block.index, block.hash) for block in frame.blocks))
    stream = await rig.connect()
    for sent in (left, frame):
        await stream.send(sent, payload)
        await answer(stream)
    first, second = rig.peer.got
    assert first.blocks == second.blocks == frame.blocks
    assert rig.peer.blocks == [bytes(page) for page in payload] * 2
    await stream.close()


async def test_frames_arrive_whole_in_order_and_answers_come_back(rig: Rigged) -> None:
    stream = await rig.connect()
    sent = [os.urandom(1 << size) for size in (0, 3, 10, 16, 20)]
    for body in sent:
        await stream.send(note(body))
        assert await answer(stream) == body[:8]
    assert rig.peer.bodies == sent
    await stream.close()


@pytest.mark.parametrize("unit", [1, 1000, 32 << 10, 300_000, PAGE])
async def test_blocks_arrive_byte_for_byte_whatever_their_size_and_page(rig: Rigged, unit: int) -> None:
    stream = await rig.connect()
    frame, payload = rig.pages(7, 0, 3, 3, 12, unit=unit)
    for _ in range(3):
        await stream.send(frame, payload)
        await answer(stream)
    assert rig.peer.blocks == [bytes(page) for page in payload] * 3
    await stream.close()


async def test_many_frames_in_flight_keep_their_order_towards_what_is_said_after_them(rig: Rigged) -> None:
    stream = await rig.connect()
    for number in range(40):
        await stream.send(*rig.pages(number))
    await stream.send(note(b"commit"))
    while await answer(stream) != b"commit":
        pass
    assert len(rig.peer.blocks) == 40, "what was sent before has arrived before"
    assert sorted(struct.unpack("<I", block[:4])[0] for block in rig.peer.blocks) == list(range(40))
    await stream.close()


async def test_a_frame_of_many_megabytes_passes(rig: Rigged) -> None:
    stream = await rig.connect()
    frame, payload = rig.pages(*range(48))
    await stream.send(frame, payload)
    await answer(stream)
    assert rig.peer.blocks == [bytes(page) for page in payload]
    await stream.close()


async def test_a_block_is_a_copy(rig: Rigged) -> None:
    stream = await rig.connect()
    frame, payload = rig.pages(50)
    await stream.send(frame, payload)
    await answer(stream)
    before = bytes(payload[0])
    rig.memory.page(50)[100:200] = bytes(100)
    assert rig.peer.blocks == [before]
    await stream.close()


async def test_the_receiver_may_end_the_stream(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (incoming, grpc):
        monkeypatch.setattr(module, "LINGER_S", 0.1)  # for which this sender would write on
    rig.peer.stop_after = 1
    stream = await rig.connect()
    await stream.send(note(b"one"))
    assert await answer(stream) == b"one"
    assert await stream.receive() is None
    assert await stream.receive() is None
    with pytest.raises(WorkerLost):
        async with asyncio.timeout(30):
            await send_for_ever(stream)
    await stream.close()


async def test_the_last_answer_reaches_a_sender_that_is_still_writing(rig: Rigged) -> None:
    for count in range(1, 11):
        rig.peer.stop_after = count
        stream = await rig.connect()
        sending = asyncio.ensure_future(send_for_ever(stream))
        assert [await answer(stream) for _ in range(count)] == [b"two"] * count
        await stream.close()
        assert isinstance(await asyncio.wait_for(failure(sending), 20), WorkerLost)


async def test_the_last_answer_reaches_a_sender_that_pours_blocks(rig: Rigged) -> None:
    rig.peer.stop_after = 3

    async def pour() -> None:
        while True:
            await stream.send(*rig.pages(1, 2, 3))

    for _ in range(5):
        stream = await rig.connect()
        pouring = asyncio.ensure_future(pour())
        for _ in range(3):
            await answer(stream)
        pouring.cancel()
        await asyncio.wait({pouring})
        await stream.close()


async def test_a_closed_stream_ends_at_the_receiver_at_once(rig: Rigged) -> None:
    stream = await rig.connect()
    await stream.send(note(b"one"))
    await answer(stream)
    await stream.close()
    await stream.close()
    await asyncio.wait_for(rig.peer.ended.wait(), 20)


async def test_a_cancelled_sender_can_close_its_stream(rig: Rigged) -> None:
    stream = await rig.connect()

    async def pour() -> None:
        try:
            while True:
                await stream.send(*rig.pages(4, 5, 6, 7))
        finally:
            await stream.close()

    pouring = asyncio.ensure_future(pour())
    async with asyncio.timeout(20):
        while not rig.peer.got:  # a call that never reached the receiver has no end there
            await asyncio.sleep(0.001)
    pouring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pouring
    await asyncio.wait_for(rig.peer.ended.wait(), 20)


async def test_a_receiver_that_crashes_is_a_lost_worker(rig: Rigged) -> None:
    rig.peer.crash = True
    stream = await rig.connect()
    await stream.send(note(b"one"))
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(read_to_the_end(stream), 30)
    await stream.close()
    await asyncio.wait_for(rig.peer.ended.wait(), 20)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "/nowhere/kv"])
async def test_nobody_at_the_address_is_a_lost_worker(rig: Rigged, address: str) -> None:
    async def call() -> None:
        stream = await rig.transport.connect(address)
        await stream.send(note(b"one"))
        await stream.receive()

    with pytest.raises(WorkerLost):
        await asyncio.wait_for(call(), 30)


async def test_a_receiver_that_goes_away_is_a_lost_worker(rig: Rigged) -> None:
    stream = await rig.connect()
    await stream.send(note(b"one"))
    assert await answer(stream) == b"one"
    await rig.stop()
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(read_to_the_end(stream), 30)
    await stream.close()
    await asyncio.wait_for(rig.peer.ended.wait(), 20)


async def test_a_transport_that_closes_ends_its_streams_without_cancelling_their_users(rig: Rigged) -> None:
    stream = await rig.connect()
    await stream.send(note(b"one"))
    assert await answer(stream) == b"one"
    reading = asyncio.ensure_future(stream.receive())
    await asyncio.sleep(0.01)
    await rig.transport.close()
    assert isinstance(await asyncio.wait_for(failure(reading), 20), WorkerLost)
    await asyncio.wait_for(rig.peer.ended.wait(), 20)


async def test_streams_side_by_side_dont_mix(rig: Rigged) -> None:
    streams = [await rig.connect() for _ in range(8)]
    for number, stream in enumerate(streams):
        await stream.send(note(b"number %d" % number))
    assert [await answer(stream) for stream in streams] == [b"number %d" % n for n in range(8)]
    for stream in streams:
        await stream.close()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_sender_that_resets_its_connection_is_noticed_under_uvloop(
    kind: str, memory: PageMemory, tmp_path: Path
) -> None:
    """Closing with replies unread resets the connection; libuv stops watching such a socket without a word."""

    async def pour_and_leave() -> None:
        peer = Peer()
        made = await RIGS[kind](peer.accept, memory, tmp_path)
        rig = Rigged(made.transport, made.address, peer, made.stop, memory)
        stream = await rig.connect()
        for _ in range(30):
            await stream.send(*rig.pages(1))
        while not peer.got:
            await asyncio.sleep(0.001)
        await stream.close()
        await asyncio.wait_for(peer.ended.wait(), 30)
        await made.transport.close()
        await made.stop()

    uvloop.run(pour_and_leave())
