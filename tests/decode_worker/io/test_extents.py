"""Pages that come in parts, from several hosts of one sender: whole once all parts are verified, not before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.kv.layout.extents import gather
from baton.kv.memory import block_sums
from baton.kv.wire import frames
from baton.kv.wire.base import QueuedReplyStream, deliver
from baton.kv.wire.frames import Block, Frame, Kind
from baton.protos.channel import BlocksReceived, Commit
from baton.protos.errors import BatonError
from baton.protos.nouns import Extent
from tests.decode_worker.io.intake_rig import LAYOUT, Lease, Rig, refused

SIZE = LAYOUT.page_bytes
LAYERS = (Extent(0, SIZE // 2, 0, 1),), (Extent(SIZE // 2, SIZE // 2, 0, 1),)
HEADS = (Extent(0, 8, 32, SIZE // 32),), (Extent(8, 24, 32, SIZE // 32),)
THREE = *LAYERS[:1], (Extent(SIZE // 2, SIZE // 4, 0, 1),), (Extent(SIZE // 4 * 3, SIZE // 4, 0, 1),)


class Host:
    """One host of a sender: its stream, and what was replied to it."""

    def __init__(self, rig: Rig, lease: Lease, rank: int, parts: tuple[tuple[Extent, ...], ...]) -> None:
        self.lease, self.part, self.line = lease, parts[rank], QueuedReplyStream()
        self.shard = {"shard_rank": rank, "shard_count": len(parts)}
        self._sink = rig.intake.accept(self.line)

    def send(self, data: bytes) -> None:
        deliver(self._sink, data)

    def open(self) -> Host:
        said = frames.decode(self.lease.open(extents=self.part))
        self.send(self.lease.frame(Kind.OPEN, body=bytes(said.body), **self.shard))
        return self

    def block(self, index: int, damaged: bool = False) -> None:
        payload = bytes(gather(memoryview(self.lease.payload(index)), self.part))
        entry = Block(index, self.lease.hashes[index], block_sums.checksum(payload) ^ damaged)
        fields = {"blocks": (entry,), "unit": len(payload), "flags": 1, **self.shard}
        frame = Frame(Kind.BLOCK, self.lease.id, self.lease.epoch, **fields)
        self.send(frames.message(frame, [payload]))

    def commit(self) -> None:
        self.send(self.lease.commit(**self.shard))

    def break_off(self) -> None:
        self._sink.over(None)

    @property
    def replies(self) -> list[Frame]:
        queue = self.line._replies
        found = [queue.get_nowait() for _ in range(queue.qsize())]
        for reply in found:
            queue.put_nowait(reply)
        return [frames.decode(reply) for reply in found if reply is not None]

    @property
    def refusal(self) -> BatonError:
        return refused(self.replies)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.end()


def hosts(rig: Rig, lease: Lease, parts: tuple[tuple[Extent, ...], ...]) -> list[Host]:
    return [Host(rig, lease, rank, parts).open() for rank in range(len(parts))]


def end(*all_of: Host) -> None:
    for each in all_of:
        each.break_off()


@pytest.mark.parametrize("parts", [LAYERS, HEADS, THREE], ids=["layers", "heads", "three hosts"])
async def test_a_block_counts_once_every_hosts_part_is_verified_and_the_commit_waits_for_all(rig, parts):
    lease = rig.admit(1, 40)
    found = hosts(rig, lease, parts)
    for host in found[1:]:
        for index in range(3):
            host.block(index)
        host.commit()
    assert not rig.heard(BlocksReceived)
    assert not rig.heard(Commit)
    for index in range(3):
        found[0].block(index)
    assert not rig.heard(Commit)
    found[0].commit()
    assert [each.blocks for each in rig.heard(BlocksReceived)] == [(0,), (1,), (2,)]
    assert len(rig.heard(Commit)) == 1
    assert [host.replies[-1].subject for host in found] == [Kind.COMMIT] * len(parts)
    assert rig.written() == {lease.pages.pages[index]: lease.payload(index) for index in range(3)}


async def test_a_damaged_part_ends_all_hosts_streams_and_its_block_stays_missing(rig):
    lease = rig.admit(1, 20)
    one, other = hosts(rig, lease, HEADS)
    one.block(0)
    other.block(0, damaged=True)
    assert other.refusal.label == "corrupt_frame"
    assert one.refusal.param == "shard_rank"
    assert not rig.heard(BlocksReceived)


@pytest.mark.parametrize(
    "parts",
    [(LAYERS[0], LAYERS[0]), (LAYERS[0], HEADS[1]), (LAYERS[0], (Extent(SIZE // 2, 8, 0, 1),))],
    ids=["the same", "overlapping", "a gap"],
)
async def test_parts_that_are_no_page_together_are_refused_before_a_byte_is_placed(rig, parts):
    lease = rig.admit(1, 20)
    one, other = hosts(rig, lease, parts)
    assert other.refusal.param == "extents"
    one.block(0)
    assert not rig.heard(BlocksReceived)
    end(one)


async def test_parts_beyond_the_page_of_one_sender_alone_or_beside_whole_pages_are_refused(rig):
    lease = rig.admit(1, 20)
    beyond = Host(rig, lease, 0, ((Extent(8, SIZE, 0, 1),), LAYERS[1])).open()
    alone = Host(rig, lease, 0, ((Extent(0, SIZE, 0, 1),),)).open()
    assert (beyond.refusal.param, alone.refusal.param) == ("extents", "extents")
    one = Host(rig, lease, 0, LAYERS).open()
    whole = Host(rig, lease, 1, ((), ())).open()
    assert whole.refusal.label in ("layout_mismatch", "handoff_refused")
    end(one)


async def test_a_host_that_goes_ends_the_others_streams_and_a_new_epoch_keeps_verified_parts(rig):
    lease = rig.admit(1, 40)
    one, other = hosts(rig, lease, LAYERS)
    one.block(0)
    other.block(0)
    one.block(1)
    other.break_off()
    assert one.refusal.param == "shard_rank"
    lease.epoch = 2
    rig.intake.rearm(1, 2)
    one, other = hosts(rig, lease, LAYERS)
    other.block(1)  # of the first host it is here already
    for host in (one, other):
        host.block(2)
        host.commit()
    assert sorted(i for each in rig.heard(BlocksReceived) for i in each.blocks) == [0, 1, 2]
    assert rig.written() == {lease.pages.pages[index]: lease.payload(index) for index in range(3)}
    assert len(rig.heard(Commit)) == 1


async def test_a_new_epochs_other_parts_are_not_mixed_with_the_last_ones(rig):
    lease = rig.admit(1, 20)
    one, other = hosts(rig, lease, LAYERS)
    one.block(1)
    end(one, other)
    lease.epoch = 2
    rig.intake.rearm(1, 2)
    one, other = hosts(rig, lease, HEADS)
    other.block(1)
    assert not rig.heard(BlocksReceived)
    one.block(1)
    assert [each.blocks for each in rig.heard(BlocksReceived)] == [(1,)]
    end(one, other)


async def test_one_sender_of_whole_pages_takes_over_from_several(rig):
    lease = rig.admit(1, 20)
    one, other = hosts(rig, lease, LAYERS)
    one.block(0)
    end(one, other)
    lease.epoch = 2
    rig.intake.rearm(1, 2)
    replies = await rig.exchange(*lease.everything())
    assert replies[-1].subject == Kind.COMMIT
    assert len(rig.heard(Commit)) == 1
