"""Blocks that land in their pages before they are verified."""

from __future__ import annotations

from typing import Any

import pytest

from baton.kv.wire import frames
from baton.kv.wire.base import QueuedReplyStream, deliver
from baton.kv.wire.frames import Frame, Kind
from baton.protos.channel import BlocksReceived, Commit, ReceiveClosed
from tests.decode_worker.io.intake_rig import Lease, Rig, rig

__all__ = ["rig"]


# ---- blocks that land before they are verified ---------------------------------------------------------


def land(rig: Rig, lease: Lease, raw: bytes, good: bool = True) -> tuple[Any, QueuedReplyStream, Frame]:
    """A transport that lands a frame's bytes in their places first, and is at the point of saying so."""
    line = QueuedReplyStream()
    sink = rig.intake.accept(line)
    deliver(sink, lease.open())
    frame, payload = frames.split(raw)
    places = sink.place(frame)
    assert places is not None
    for place, data in zip(places, payload, strict=True):
        place[:] = data if good else bytes(len(data))
    return sink, line, frame


def sums(frame: Frame) -> list[int]:
    return [block.checksum for block in frame.blocks]


async def test_a_block_counts_only_once_its_checksum_was_compared(rig: Rig) -> None:
    lease = rig.admit(1, 40)
    sink, _, frame = land(rig, lease, lease.blocks([(0, {}), (1, {}), (2, {})]))
    assert not rig.heard(BlocksReceived)
    deliver(sink, lease.commit())
    assert not rig.heard(Commit), "a commit is refused while a block is only on its way"
    sink.landed(frame, sums(frame))
    assert not rig.heard(BlocksReceived), "the stream was ended by the refusal"


async def test_a_block_that_lands_damaged_never_counts_and_its_page_is_free_to_be_filled_again(rig: Rig) -> None:
    lease = rig.admit(1, 16)
    sink, line, frame = land(rig, lease, lease.block(0), good=False)
    sink.landed(frame, [0])
    assert rig.intake.refusals == {"corrupt_frame": 1}
    assert not rig.heard(BlocksReceived)
    assert line.ended
    assert (await rig.exchange(*lease.everything()))[-1].subject == Kind.COMMIT
    assert rig.written() == {lease.pages.pages[0]: lease.payload(0)}


async def test_what_an_earlier_epoch_brought_is_not_landed_on_again(rig: Rig) -> None:
    lease = rig.admit(1, 40)
    await rig.exchange(lease.open(), lease.block(0))
    rig.intake.rearm(1, 2)
    lease.epoch = 2
    sink, *_ = land(rig, lease, lease.blocks([(0, {}), (1, {})]), good=False)
    sink.over(None)
    assert rig.written() == {lease.pages.pages[0]: lease.payload(0)}, "verified bytes stay"
    rig.intake.rearm(1, 3)
    lease.epoch = 3
    rest = [lease.open(), lease.blocks([(1, {}), (2, {})]), lease.commit()]
    assert (await rig.exchange(*rest))[-1].subject == Kind.COMMIT
    assert rig.written() == {lease.pages.pages[i]: lease.payload(i) for i in range(3)}


@pytest.mark.parametrize("end", ["rearm", "close"])
async def test_a_stream_that_is_ended_while_a_block_lands_counts_nothing_more(rig: Rig, end: str) -> None:
    lease = rig.admit(1, 16)
    sink, line, frame = land(rig, lease, lease.block(0))
    rig.intake.rearm(1, 2) if end == "rearm" else rig.intake.close(1)
    assert line.ended, "the transport writes nothing from this moment"
    assert rig.told[-1] == ReceiveClosed(1, 1)
    sink.landed(frame, sums(frame))
    assert sink.place(frame) is None
    assert not rig.heard(BlocksReceived)
