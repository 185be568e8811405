"""The sending side of a handoff, against a scripted receiver and against the real one over each transport."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.layout import prefix
from baton.kv.layout.page import layout_for
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import shm, tcp
from baton.kv.transport.grpc import SERVER_OPTIONS, GrpcTransport, handoff_handler
from baton.kv.transport.loopback import LoopbackTransport
from baton.kv.wire import control, frames
from baton.kv.wire.base import ReplyStream, Transport
from baton.kv.wire.frames import Frame, Kind
from baton.prefill_worker.io import handoff as handoff_module
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.protos.channel import BlocksReceived, Commit, ReceiveClosed, ReceiveOpened, ShipBlock
from baton.protos.errors import BatonError, CorruptFrame, LeaseUnknown, StaleEpoch, WorkerLost
from baton.protos.nouns import TokenRun

LAYOUT = layout_for("float32", 2, 2, 8)
FINGERPRINT = "f" * 64
FIRST = TokenRun(0, (42,), finish_reason="length")
LEASE = b"L" * 16
BLOCKS = 6


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Source:
    """A prefill worker's pages and the blocks of one prompt, page order unlike block order."""

    def __init__(self) -> None:
        self.memory = PageMemory.create(BLOCKS, LAYOUT.page_bytes)
        self.memory.view()[:] = os.urandom(BLOCKS * LAYOUT.page_bytes)
        self.hashes = prefix.chain(prefix.root(FINGERPRINT, "float32"), range(16 * BLOCKS - 3))
        self.blocks = [
            ShipBlock(i, BLOCKS - 1 - i, self.hashes[i], 16 if i < BLOCKS - 1 else 13) for i in range(BLOCKS)
        ]

    def handoff(
        self, transport: Transport, address: str = "d0", clock: Callable[[], float] | None = None, **settings: Any
    ) -> Handoff:
        sender = Sender("p0", "m", FINGERPRINT, LAYOUT)
        destination = Destination(address, LEASE, 1, "r", BLOCKS, 13)
        return Handoff(transport, self.memory, sender, destination, clock or Clock(), **settings)


class Receiver:
    """Takes frames and answers as told; never looks at an epoch or a lease."""

    def __init__(self) -> None:
        self.got: list[Frame] = []
        self.pages: dict[int, bytes] = {}
        self.unanswered: list[int] = []
        self.open = asyncio.Event()
        self.open.set()
        self.closed = asyncio.Event()
        self.refuse_at: int | None = None
        self.error: BatonError = StaleEpoch("epoch 2 is in force", "epoch")

    def accept(self, line: ReplyStream) -> Scripted:
        return Scripted(self, line)

    async def answer(self, frame: Frame, line: ReplyStream) -> None:
        await self.open.wait()
        blocks, self.unanswered = self.unanswered, []
        line.reply(frames.ack(frame, blocks if frame.kind is Kind.BLOCK else ()))

    def kinds(self) -> list[Kind]:
        return [frame.kind for frame in self.got]


class Scripted:
    """One stream to a Receiver."""

    def __init__(self, receiver: Receiver, line: ReplyStream) -> None:
        self.receiver, self.line = receiver, line
        self.answering: set[asyncio.Task[None]] = set()

    def take(self, frame: Frame) -> None:
        there = self.receiver
        there.got.append(frame)
        if there.refuse_at == len(there.got):
            self.line.reply(frames.encode(Frame(Kind.ERROR, body=control.encode_error(there.error))))
            self.line.end()
        elif frame.kind is Kind.OPEN:
            self.line.reply(frames.ack(frame))
        elif frame.kind is Kind.COMMIT or frame.wants_ack:
            self.answering.add(asyncio.ensure_future(there.answer(frame, self.line)))

    def place(self, frame: Frame) -> list[memoryview]:
        self.places = [memoryview(bytearray(frame.unit)) for _ in frame.blocks]
        return self.places

    def landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        assert list(checksums) == [block.checksum for block in frame.blocks]
        for block, place in zip(frame.blocks, self.places, strict=True):
            self.receiver.pages[block.index] = bytes(place)
            self.receiver.unanswered.append(block.index)
        self.take(frame)

    def over(self, error: BatonError | None) -> None:
        self.receiver.closed.set()
        self.line.end()
        for answer in self.answering:
            answer.cancel()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
async def transport(receiver: Receiver) -> AsyncIterator[Transport]:
    made = LoopbackTransport({"d0": receiver.accept})
    yield made
    await made.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_blocks_leave_as_they_are_announced(receiver: Receiver, transport: Transport) -> None:
    source = Source()
    handoff = source.handoff(transport)
    running = asyncio.ensure_future(handoff.run())
    await settle()
    assert receiver.kinds() == [Kind.OPEN], "the stream opens while the first chunk computes"
    handoff.ship(source.blocks[:2])
    await settle()
    assert receiver.kinds() == [Kind.OPEN, Kind.BLOCK]
    assert sorted(receiver.pages) == [0, 1], "blocks that are ready together share a frame"
    handoff.ship(source.blocks[2:])
    handoff.commit(FIRST, 32)
    report = await running
    assert receiver.kinds() == [Kind.OPEN, Kind.BLOCK, Kind.BLOCK, Kind.COMMIT]
    assert sorted(receiver.pages) == list(range(BLOCKS))
    assert (report.shipped_blocks, report.shipped_bytes) == (BLOCKS, BLOCKS * LAYOUT.page_bytes)
    assert receiver.closed.is_set()


async def test_every_frame_says_whose_it_is(receiver: Receiver, transport: Transport) -> None:
    source = Source()
    handoff = source.handoff(transport)
    handoff.ship(source.blocks)
    handoff.commit(FIRST, 32)
    await handoff.run()
    opening = control.decode_opening(receiver.got[0].body)
    assert (opening.layout, opening.total_blocks, opening.tail_tokens) == (LAYOUT, BLOCKS, 13)
    assert (opening.sender, opening.fingerprint, opening.request_id) == ("p0", FINGERPRINT, "r")
    for frame in receiver.got:
        assert (frame.lease, frame.epoch, frame.shard_rank, frame.shard_count) == (LEASE, 1, 0, 1)
    sent = [block for frame in receiver.got for block in frame.blocks]
    for block, told in zip(source.blocks, sent, strict=True):
        assert (told.index, told.hash) == (block.index, block.hash)
        assert receiver.pages[block.index] == bytes(source.memory.page(block.page))
    assert control.decode_closing(receiver.got[-1].body) == control.Closing(FIRST, 32)


async def test_only_what_is_announced_is_sent(receiver: Receiver, transport: Transport) -> None:
    source = Source()
    handoff = source.handoff(transport)
    handoff.ship([source.blocks[3], source.blocks[5]])
    handoff.commit(FIRST, 64)
    assert (await handoff.run()).shipped_blocks == 2
    assert sorted(receiver.pages) == [3, 5]


@pytest.mark.parametrize("pages", [0, 1, 2, 4])
async def test_bytes_in_flight_stay_within_the_window(receiver: Receiver, transport: Transport, pages: int) -> None:
    source = Source()
    receiver.open.clear()
    handoff = source.handoff(transport, window_bytes=pages * LAYOUT.page_bytes)
    handoff.ship(source.blocks)
    handoff.commit(FIRST, 0)
    running = asyncio.ensure_future(handoff.run())
    await settle()
    assert handoff.shipped_blocks == max(1, pages), "one page at least may always be on its way"
    receiver.open.set()
    assert (await asyncio.wait_for(running, 30)).shipped_blocks == BLOCKS


async def test_times_are_the_senders_own(receiver: Receiver, transport: Transport) -> None:
    source, clock = Source(), Clock()
    receiver.open.clear()
    handoff = source.handoff(transport, clock=clock)
    running = asyncio.ensure_future(handoff.run())
    handoff.ship(source.blocks[:1])
    await settle()
    clock.now += 2.0
    receiver.open.set()
    await settle()
    clock.now += 7.0  # nothing in flight
    receiver.open.clear()
    handoff.ship(source.blocks[1:2])
    handoff.commit(FIRST, 0)
    await settle()
    clock.now += 0.5
    receiver.open.set()
    report = await running
    assert report.exposed_s == pytest.approx(0.5)
    assert report.busy_s == pytest.approx(2.5)


async def test_what_is_exposed_counts_from_the_engines_own_word(receiver: Receiver, transport: Transport) -> None:
    """The message may wait in a busy process; a clock ahead of ours must not make time run backwards."""
    for told, exposed in ((96.0, 4.0), (None, 0.0), (101.0, 0.0)):
        source, clock = Source(), Clock()
        clock.now = 100.0
        handoff = source.handoff(transport, clock=clock)
        handoff.ship(source.blocks)
        handoff.commit(FIRST, 0, told)
        assert (await handoff.run()).exposed_s == pytest.approx(exposed)


@pytest.mark.parametrize("at", [1, 2, 4, 2 + BLOCKS])
async def test_a_refusal_is_raised_as_its_own_type(receiver: Receiver, transport: Transport, at: int) -> None:
    source = Source()
    receiver.refuse_at = at
    handoff = source.handoff(transport, window_bytes=LAYOUT.page_bytes)
    handoff.ship(source.blocks)
    handoff.commit(FIRST, 0)
    with pytest.raises(StaleEpoch, match="epoch 2 is in force"):
        await handoff.run()
    assert receiver.closed.is_set()


async def test_a_refusal_interrupts_a_sender_that_waits_for_its_engine(
    receiver: Receiver, transport: Transport
) -> None:
    receiver.refuse_at = 1
    with pytest.raises(StaleEpoch):
        await asyncio.wait_for(Source().handoff(transport).run(), 30)


async def test_a_cancelled_handoff_closes_its_stream_and_reads_no_page_again(
    receiver: Receiver, transport: Transport
) -> None:
    source = Source()
    receiver.open.clear()
    handoff = source.handoff(transport, window_bytes=LAYOUT.page_bytes)
    handoff.ship(source.blocks)
    running = asyncio.ensure_future(handoff.run())
    await settle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert receiver.closed.is_set()
    source.memory.close()
    handoff.ship(source.blocks)
    await settle()
    assert handoff.shipped_blocks == 1
    assert len(asyncio.all_tasks()) == 1, "nothing of it runs on"


async def test_a_prompt_that_fails_ends_the_handoff_without_a_commit(
    receiver: Receiver, transport: Transport
) -> None:
    source = Source()
    handoff = source.handoff(transport)
    handoff.ship(source.blocks[:2])
    handoff.fail(WorkerLost("the engine died", "decode_address"))
    with pytest.raises(WorkerLost, match="the engine died"):
        await handoff.run()
    assert Kind.COMMIT not in receiver.kinds()
    assert receiver.closed.is_set()


async def test_a_receiver_that_ends_early_is_a_lost_worker(transport: LoopbackTransport) -> None:
    class Leaving(Scripted):
        def take(self, frame: Frame) -> None:
            self.line.reply(frames.ack(frame))
            self.line.end()

    transport.receivers["d0"] = lambda line: Leaving(Receiver(), line)
    with pytest.raises(WorkerLost, match="ended the handoff early"):
        await asyncio.wait_for(Source().handoff(transport).run(), 30)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1"])
async def test_nobody_at_the_address_is_a_lost_worker(address: str) -> None:
    transport: Transport = LoopbackTransport() if address == "nowhere" else GrpcTransport()
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(Source().handoff(transport, address).run(), 30)
    await transport.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"noise",
        frames.encode(Frame(Kind.ACK, b"?" * 16, 1, subject=Kind.COMMIT)),
        frames.encode(Frame(Kind.ACK, LEASE, 2, subject=Kind.COMMIT)),
        frames.encode(Frame(Kind.COMMIT, LEASE, 1)),
        frames.ack(Frame(Kind.BLOCK, LEASE, 1), [5]),
    ],
    ids=["noise", "another lease", "another epoch", "a sender's frame", "a block not sent"],
)
async def test_an_answer_that_fits_nothing_is_refused(transport: LoopbackTransport, answer: bytes) -> None:
    class Babbling(Scripted):
        def take(self, frame: Frame) -> None:
            self.line.reply(answer)

    transport.receivers["d0"] = lambda line: Babbling(Receiver(), line)
    with pytest.raises(CorruptFrame):
        await asyncio.wait_for(Source().handoff(transport).run(), 30)


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
    there, transport, address, source = decode
    there.intake.register(IntakeLease(7, LEASE, 1, there.pages, source.hashes, 0))
    handoff = source.handoff(transport, address)
    handoff.ship(source.blocks[:2])
    running = asyncio.ensure_future(handoff.run())
    await until(lambda: there.intake.received_blocks == 2)
    there.intake.close(7)
    assert there.told[-1] == ReceiveClosed(7, 1)
    with pytest.raises(LeaseUnknown):
        await asyncio.wait_for(running, 30)


async def test_a_sender_that_is_cancelled_lets_go_of_the_receivers_pages(
    decode: tuple[Decode, Transport, str, Source],
) -> None:
    there, transport, address, source = decode
    there.intake.register(IntakeLease(7, LEASE, 1, there.pages, source.hashes, 0))
    handoff = source.handoff(transport, address)
    handoff.ship(source.blocks[:2])
    running = asyncio.ensure_future(handoff.run())
    await until(lambda: there.intake.received_blocks == 2)
    running.cancel()
    await asyncio.wait({running})
    await until(lambda: there.told[-1] == ReceiveClosed(7, 1))


async def test_a_second_prefill_finishes_what_the_first_began(
    decode: tuple[Decode, Transport, str, Source],
) -> None:
    there, transport, address, source = decode
    there.intake.register(IntakeLease(7, LEASE, 1, there.pages, source.hashes, 0))
    first = source.handoff(transport, address)
    first.ship(source.blocks[:4])
    running = asyncio.ensure_future(first.run())
    await until(lambda: there.intake.received_blocks == 4)
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
