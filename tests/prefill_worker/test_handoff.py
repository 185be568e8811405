"""The sending side of a handoff, against a scripted receiver and against the real one over both transports."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc.aio
import msgspec
import pytest

from baton.decode_worker.intake import Intake
from baton.kv import prefix
from baton.kv.layout import layout_for
from baton.kv.memory import PageMemory
from baton.kv.transport import control, frames
from baton.kv.transport.base import Transport
from baton.kv.transport.frames import Frame, Kind
from baton.kv.transport.grpc import SERVER_OPTIONS, GrpcTransport, handoff_handler
from baton.kv.transport.loopback import LoopbackTransport
from baton.prefill_worker.handoff import Destination, Handoff, Sender
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
        self.unanswered: list[int] = []
        self.open = asyncio.Event()
        self.open.set()
        self.closed = asyncio.Event()
        self.refuse_at: int | None = None
        self.error: BatonError = StaleEpoch("epoch 2 is in force", "epoch")

    async def serve(self, incoming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        try:
            async for raw in incoming:
                frame = frames.decode(raw)
                self.got.append(frame)
                if self.refuse_at == len(self.got):
                    yield frames.encode(Frame(Kind.ERROR, payload=control.encode_error(self.error)))
                    return
                async for answer in self.answers(frame):
                    yield answer
        finally:
            self.closed.set()

    async def answers(self, frame: Frame) -> AsyncGenerator[bytes, None]:
        if frame.kind is Kind.OPEN:
            yield frames.ack(frame)
            return
        if frame.kind is Kind.BLOCK:
            self.unanswered.append(frame.index)
        if frame.kind is Kind.COMMIT or frame.wants_ack:
            await self.open.wait()
            blocks, self.unanswered = self.unanswered, []
            yield frames.ack(frame, blocks if frame.kind is Kind.BLOCK else ())

    def kinds(self) -> list[Kind]:
        return [frame.kind for frame in self.got]


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
async def transport(receiver: Receiver) -> AsyncIterator[Transport]:
    made = LoopbackTransport({"d0": receiver.serve})
    yield made
    await made.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
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
    assert receiver.kinds() == [Kind.OPEN, Kind.BLOCK, Kind.BLOCK]
    handoff.ship(source.blocks[2:])
    handoff.commit(FIRST, 32)
    report = await running
    assert receiver.kinds() == [Kind.OPEN, *[Kind.BLOCK] * BLOCKS, Kind.COMMIT]
    assert (report.shipped_blocks, report.shipped_bytes) == (BLOCKS, BLOCKS * LAYOUT.page_bytes)
    assert receiver.closed.is_set()


async def test_every_frame_says_whose_it_is(receiver: Receiver, transport: Transport) -> None:
    source = Source()
    handoff = source.handoff(transport)
    handoff.ship(source.blocks)
    handoff.commit(FIRST, 32)
    await handoff.run()
    opening = control.decode_opening(receiver.got[0].payload)
    assert (opening.layout, opening.total_blocks, opening.tail_tokens) == (LAYOUT, BLOCKS, 13)
    assert (opening.sender, opening.fingerprint, opening.request_id) == ("p0", FINGERPRINT, "r")
    for frame in receiver.got:
        assert (frame.lease, frame.epoch, frame.shard_rank, frame.shard_count) == (LEASE, 1, 0, 1)
    for block, frame in zip(source.blocks, receiver.got[1:-1], strict=True):
        assert (frame.index, frame.hash) == (block.index, block.hash)
        assert bytes(frame.payload) == bytes(source.memory.page(block.page))
    assert control.decode_closing(receiver.got[-1].payload) == control.Closing(FIRST, 32)


async def test_only_what_is_announced_is_sent(receiver: Receiver, transport: Transport) -> None:
    source = Source()
    handoff = source.handoff(transport)
    handoff.ship([source.blocks[3], source.blocks[5]])
    handoff.commit(FIRST, 64)
    assert (await handoff.run()).shipped_blocks == 2
    assert [frame.index for frame in receiver.got[1:-1]] == [3, 5]


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
    assert (await asyncio.wait_for(running, 5)).shipped_blocks == BLOCKS


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


@pytest.mark.parametrize("at", [1, 2, 4, 2 + BLOCKS])
async def test_a_refusal_is_raised_as_its_own_type(receiver: Receiver, transport: Transport, at: int) -> None:
    source = Source()
    receiver.refuse_at = at
    handoff = source.handoff(transport)
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
        await asyncio.wait_for(Source().handoff(transport).run(), 5)


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
    async def leave(incoming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        yield frames.ack(frames.decode(await anext(incoming)))

    transport.receivers["d0"] = leave
    with pytest.raises(WorkerLost, match="ended the handoff early"):
        await asyncio.wait_for(Source().handoff(transport).run(), 5)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1"])
async def test_nobody_at_the_address_is_a_lost_worker(address: str) -> None:
    transport: Transport = LoopbackTransport() if address == "nowhere" else GrpcTransport()
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(Source().handoff(transport, address).run(), 5)
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
    async def babble(incoming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for _ in incoming:
            yield answer

    transport.receivers["d0"] = babble
    with pytest.raises(CorruptFrame):
        await asyncio.wait_for(Source().handoff(transport).run(), 5)


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


@pytest.fixture(params=["grpc", "loopback"])
async def decode(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Decode, Transport, str]]:
    decode = Decode()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handoff_handler(decode.intake.serve),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    loopback = request.param == "loopback"
    transport: Transport = LoopbackTransport({"d0": decode.intake.serve}) if loopback else GrpcTransport()
    yield decode, transport, "d0" if loopback else f"127.0.0.1:{port}"
    await transport.close()
    await server.stop(0)


async def test_a_prompt_arrives_byte_for_byte(decode: tuple[Decode, Transport, str]) -> None:
    there, transport, address = decode
    source = Source()
    there.intake.register(7, LEASE, 1, there.pages, source.hashes, 0)
    handoff = source.handoff(transport, address)
    handoff.ship(source.blocks)
    handoff.commit(FIRST, 32)
    await asyncio.wait_for(handoff.run(), 10)
    assert there.received() == [bytes(source.memory.page(block.page)) for block in source.blocks]
    assert there.told[0] == ReceiveOpened(7, 1)
    assert there.told[-2:] == [Commit(7, 1, FIRST, 32), ReceiveClosed(7, 1)]
    arrived = [i for message in there.told if isinstance(message, BlocksReceived) for i in message.blocks]
    assert arrived == list(range(BLOCKS))


async def test_a_lease_that_ends_midway_is_heard_at_once(decode: tuple[Decode, Transport, str]) -> None:
    there, transport, address = decode
    source = Source()
    there.intake.register(7, LEASE, 1, there.pages, source.hashes, 0)
    handoff = source.handoff(transport, address)
    handoff.ship(source.blocks[:2])
    running = asyncio.ensure_future(handoff.run())
    await until(lambda: there.intake.received_blocks == 2)
    there.intake.close(7)
    assert there.told[-1] == ReceiveClosed(7, 1)
    with pytest.raises(LeaseUnknown):
        await asyncio.wait_for(running, 5)


async def test_a_sender_that_is_cancelled_lets_go_of_the_receivers_pages(
    decode: tuple[Decode, Transport, str],
) -> None:
    there, transport, address = decode
    source = Source()
    there.intake.register(7, LEASE, 1, there.pages, source.hashes, 0)
    handoff = source.handoff(transport, address)
    handoff.ship(source.blocks[:2])
    running = asyncio.ensure_future(handoff.run())
    await until(lambda: there.intake.received_blocks == 2)
    running.cancel()
    await asyncio.wait({running})
    await until(lambda: there.told[-1] == ReceiveClosed(7, 1))


async def test_a_second_prefill_finishes_what_the_first_began(decode: tuple[Decode, Transport, str]) -> None:
    there, transport, address = decode
    source = Source()
    there.intake.register(7, LEASE, 1, there.pages, source.hashes, 0)
    first = source.handoff(transport, address)
    first.ship(source.blocks[:4])
    running = asyncio.ensure_future(first.run())
    await until(lambda: there.intake.received_blocks == 4)
    there.intake.rearm(7, 2)
    with pytest.raises(StaleEpoch):
        await asyncio.wait_for(running, 5)
    sender = Sender("p1", "m", FINGERPRINT, LAYOUT)
    second = Handoff(transport, source.memory, sender, Destination(address, LEASE, 2, "r", BLOCKS, 13), Clock())
    second.ship(source.blocks[4:])
    second.commit(FIRST, 0)
    await asyncio.wait_for(second.run(), 10)
    assert there.received() == [bytes(source.memory.page(block.page)) for block in source.blocks]
