"""The sending side of a handoff, against a scripted receiver."""

from __future__ import annotations

import asyncio

import pytest

from baton.kv.transport.grpc import GrpcTransport
from baton.kv.transport.loopback import LoopbackTransport
from baton.kv.wire import control, frames
from baton.kv.wire.base import Transport
from baton.kv.wire.frames import Frame, Kind
from baton.protos.errors import CorruptFrame, StaleEpoch, WorkerLost
from tests.prefill_worker.io.handoff_rig import (
    BLOCKS,
    FINGERPRINT,
    FIRST,
    LAYOUT,
    LEASE,
    Clock,
    Receiver,
    Scripted,
    Source,
    receiver,
    settle,
    transport,
)

__all__ = ["receiver", "transport"]


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
