"""The receiving side of a handoff: what is right is written, everything else is refused with nothing written."""

from __future__ import annotations

import asyncio

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.memory import block_sums
from baton.kv.wire import frames
from baton.kv.wire.base import QueuedReplyStream, deliver
from baton.kv.wire.frames import Block, Frame, Kind
from baton.protos.channel import BlocksReceived, Commit, ReceiveClosed, ReceiveOpened
from baton.protos.errors import CorruptFrame
from tests.decode_worker.io.intake_rig import FIRST, LAYOUT, Lease, Live, Rig, rig

__all__ = ["rig"]


# ---- what is right -------------------------------------------------------------------------------------


async def test_a_whole_handoff_is_written_reported_and_committed_in_order(rig: Rig) -> None:
    lease = rig.admit(1, 16 * 3 + 5)
    replies = await rig.exchange(*lease.everything())
    assert [Kind(reply.subject) for reply in replies] == [Kind.OPEN, *[Kind.BLOCK] * 4, Kind.COMMIT]
    assert rig.written() == {lease.pages.pages[i]: lease.payload(i) for i in range(4)}
    blocks = [BlocksReceived(1, 1, (i,)) for i in range(4)]
    assert rig.told == [ReceiveOpened(1, 1), *blocks, Commit(1, 1, FIRST, 16), ReceiveClosed(1, 1)]
    assert rig.intake.received_blocks == 4
    assert rig.intake.received_bytes == 4 * LAYOUT.page_bytes
    assert not rig.intake.refusals


async def test_blocks_already_held_are_not_expected(rig: Rig) -> None:
    lease = rig.admit(1, 40, held=2)
    await rig.exchange(lease.open(), lease.block(2), lease.commit())
    assert rig.heard(Commit)


async def test_blocks_may_come_in_any_order(rig: Rig) -> None:
    lease = rig.admit(1, 64)
    replies = await rig.exchange(lease.open(), *(lease.block(i) for i in (2, 0, 3, 1)), lease.commit())
    assert replies[-1].subject == Kind.COMMIT


async def test_acknowledgements_are_gathered_until_the_sender_wants_them(rig: Rig) -> None:
    lease = rig.admit(1, 64)
    sent = [lease.open(), *(lease.block(i, flags=0) for i in range(3)), lease.block(3), lease.commit()]
    replies = await rig.exchange(*sent)
    assert frames.acked_blocks(replies[1]) == (0, 1, 2, 3)
    assert rig.heard(BlocksReceived) == [BlocksReceived(1, 1, (0, 1, 2, 3))]


async def test_what_arrived_is_reported_even_if_nothing_was_acknowledged(rig: Rig) -> None:
    lease = rig.admit(1, 64)
    await rig.exchange(lease.open(), lease.block(0, flags=0), lease.block(2, flags=0))
    assert rig.told == [ReceiveOpened(1, 1), BlocksReceived(1, 1, (0, 2)), ReceiveClosed(1, 1)]


async def test_one_frame_may_carry_several_blocks(rig: Rig) -> None:
    lease = rig.admit(1, 16 * 5)
    replies = await rig.exchange(
        lease.open(), lease.blocks([(3, {}), (0, {})]), lease.blocks([(1, {}), (2, {}), (4, {})]), lease.commit()
    )
    assert [frames.acked_blocks(reply) for reply in replies[1:3]] == [(3, 0), (1, 2, 4)]
    assert rig.written() == {lease.pages.pages[i]: lease.payload(i) for i in range(5)}


async def test_a_preflights_bytes_are_checked_and_dropped(rig: Rig) -> None:
    page = b"x" * 100
    probe = Frame(Kind.PROBE, unit=100, blocks=(Block(0, bytes(32), block_sums.checksum(page)),) * 3)
    (reply,) = await rig.exchange(frames.message(probe, [page] * 3))
    assert (reply.kind, reply.subject) == (Kind.ACK, Kind.PROBE)
    assert isinstance(await rig.refusal(frames.message(probe, [page, page, b"y" * 100])), CorruptFrame)
    vast = msgspec.structs.replace(probe, unit=1 << 30)
    line = QueuedReplyStream()
    assert rig.intake.accept(line).place(vast) is None, "nothing is allocated for it"
    assert not rig.told
    assert not rig.written()


# ---- anything in any order -----------------------------------------------------------------------------

KINDS = ["block", "block", "block", "commit", "open", "rearm", "close", "flip", "foreign", "stale"]
MOVES = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 1),
        st.integers(0, 5),
    ),
    max_size=25,
)


@given(MOVES)
def test_whatever_comes_a_page_holds_its_own_block_or_nothing(moves: list[tuple[str, int, int]]) -> None:
    asyncio.run(_play(moves))


async def _play(moves: list[tuple[str, int, int]]) -> None:
    rig = Rig()
    leases = [rig.admit(0, 50), rig.admit(1, 70, held=2)]
    streams = [Live(rig), Live(rig)]
    all_streams = list(streams)
    for move, who, index in moves:
        lease, other = leases[who], leases[1 - who]
        if move == "rearm":
            lease.epoch += 1
            rig.intake.rearm(who, lease.epoch)
            continue
        if move == "close":
            rig.intake.close(who)
            lease.pages.close()
            continue
        if move == "open":
            streams[who] = Live(rig)
            all_streams.append(streams[who])
        streams[who].send(_move(move, lease, other, index))
        reading = asyncio.ensure_future(streams[who].reply())
        await asyncio.wait({reading}, timeout=20)
        assert reading.done(), "every frame here is answered, or its stream has ended"
        reading.exception()
    right = {lease.pages.pages[i]: lease.payload(i) for lease in leases for i in range(len(lease.hashes))}
    held = set(leases[1].pages.pages[:2])
    for page, data in rig.written().items():
        assert data == right[page]
        assert page not in held
    for commit in rig.heard(Commit):
        lease = leases[commit.key]
        for index in range(lease.pages.held, len(lease.hashes)):
            assert bytes(rig.memory.page(lease.pages.pages[index])) == lease.payload(index)
    assert len(rig.heard(Commit)) == len({commit.key for commit in rig.heard(Commit)})
    for stream in all_streams:
        await stream.replies.aclose()
    assert sorted((m.key, m.epoch) for m in rig.heard(ReceiveOpened)) == sorted(
        (m.key, m.epoch) for m in rig.heard(ReceiveClosed)
    )
    rig.end()


def _move(move: str, lease: Lease, other: Lease, index: int) -> bytes:
    if move == "open":
        return lease.open()
    if move == "commit":
        return lease.commit()
    if move == "foreign":
        return lease.block(index, hash=(other.hashes * 2)[index], payload=other.payload(index))
    if move == "stale":
        return lease.block(index, epoch=lease.epoch - 1, payload=other.payload(index))
    if move == "flip":
        raw = bytearray(lease.block(index, payload=lease.payload(index)))
        raw[index * 13] ^= 1
        return bytes(raw)
    return lease.block(index)


def test_a_stream_that_was_refused_and_ends_late_leaves_the_one_after_it_alone() -> None:
    rig = Rig()
    lease, lines = rig.admit(1, 40), [QueuedReplyStream(), QueuedReplyStream()]
    first, second = map(rig.intake.accept, lines)
    deliver(first, lease.open())
    deliver(first, lease.block(0, payload=b"too short"))
    assert lines[0].ended
    deliver(second, lease.open())
    first.over(None)  # its connection is closed by now
    assert not lines[1].ended
    for sent in lease.everything()[1:]:
        deliver(second, sent)
    assert rig.heard(Commit)
    rig.end()
