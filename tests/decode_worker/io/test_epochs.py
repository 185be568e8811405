"""Commits, re-arms and ends of a handoff, in whatever order they come."""

from __future__ import annotations

import asyncio

import pytest

from baton.kv.wire.frames import Frame, Kind
from baton.protos.channel import BlocksReceived, ReceiveClosed, ReceiveOpened
from baton.protos.errors import BatonError, LeaseUnknown
from tests.decode_worker.io.intake_rig import LAYOUT, Lease, Live, Rig, refused, rig

__all__ = ["rig"]


# ---- time ----------------------------------------------------------------------------------------------


async def test_a_late_frame_after_the_commit_is_refused(rig: Rig) -> None:
    lease = rig.admit(1, 40)
    await rig.exchange(*lease.everything())
    before = rig.written()
    zeros = lease.block(0, payload=bytes(LAYOUT.page_bytes))
    for late in ([lease.open()], [lease.open(), zeros], [zeros], [lease.commit()]):
        assert (await rig.refusal(*late)).label == "already_committed"
    assert rig.written() == before


async def turns() -> None:
    """Gives the event loop 50 turns, enough to read whatever was sent."""
    for _ in range(50):
        await asyncio.sleep(0)


async def committing(rig: Rig) -> tuple[Lease, asyncio.Future[Frame]]:
    """Sends one block and its commit, which the engine doesn't confirm; returns the lease and the reply to come."""
    rig.commits = False
    lease, live = rig.admit(1, 16), Live(rig)
    await live.ask(lease.open())
    await live.ask(lease.block(0))
    live.send(lease.commit())
    waiting = asyncio.ensure_future(live.reply())
    await turns()
    return lease, waiting


async def test_nothing_is_written_between_the_commit_frame_and_the_engines_answer(rig: Rig) -> None:
    lease, waiting = await committing(rig)
    assert (await rig.refusal(lease.open(), lease.block(0))).label == "already_committed"
    rig.intake.rearm(1, 2)
    assert refused([await waiting]).label == "stale_epoch"
    lease.epoch = 2
    assert (await rig.refusal(lease.open(), lease.block(0))).label == "already_committed"


async def test_a_request_that_ends_with_its_first_token_is_still_acknowledged(rig: Rig) -> None:
    _, waiting = await committing(rig)
    rig.intake.on_committed(1, 1)
    rig.intake.close(1)
    assert (await waiting).subject == Kind.COMMIT


async def test_a_rearm_ends_the_old_stream_at_once_and_keeps_what_is_in(rig: Rig) -> None:
    lease, live = rig.admit(1, 64), Live(rig)
    await live.ask(lease.open())
    await live.ask(lease.block(0))
    live.send(lease.block(1, flags=0))
    await asyncio.sleep(0)
    rig.intake.rearm(1, 2)
    assert rig.told[-1] == ReceiveClosed(1, 1), "the engine hears it before any other message"
    assert refused([await live.reply()]).label == "stale_epoch"
    arrived = {block for message in rig.heard(BlocksReceived) for block in message.blocks}
    lease.epoch = 2
    rest = [lease.block(i) for i in range(4) if i not in arrived]
    assert (await rig.exchange(lease.open(), *rest, lease.commit()))[-1].subject == Kind.COMMIT


async def test_frames_that_are_queued_when_the_epoch_ends_are_not_written(rig: Rig) -> None:
    lease, live = rig.admit(1, 64), Live(rig)
    await live.ask(lease.open())
    for index in range(4):
        live.send(lease.block(index))
    rig.intake.rearm(1, 2)
    assert refused([await live.reply()]).label == "stale_epoch"
    assert not rig.written()


async def test_a_second_prefill_may_send_again_what_the_first_one_sent(rig: Rig) -> None:
    lease = rig.admit(1, 40)
    await rig.exchange(lease.open(), lease.block(0))
    rig.intake.rearm(1, 2)
    lease.epoch = 2
    assert (await rig.exchange(*lease.everything()))[-1].subject == Kind.COMMIT


async def test_only_a_later_epoch_rearms(rig: Rig) -> None:
    lease = rig.admit(1, 16)
    rig.intake.rearm(1, 1)
    rig.intake.rearm(9, 5)
    assert (await rig.exchange(*lease.everything()))[-1].subject == Kind.COMMIT


async def test_a_closed_lease_ends_its_stream_and_takes_nothing_more(rig: Rig) -> None:
    lease, live = rig.admit(1, 64), Live(rig)
    await live.ask(lease.open())
    live.send(lease.block(0))
    rig.intake.close(1)
    lease.pages.close()
    assert rig.told[-1] == ReceiveClosed(1, 1)
    assert isinstance(refused([await live.reply()]), LeaseUnknown)
    assert (await rig.refusal(lease.open())).label == "lease_unknown"
    rig.intake.close(1)
    assert not rig.written()
    assert len(rig.heard(ReceiveClosed)) == 1


async def test_pages_of_an_ended_request_wait_for_its_stream(rig: Rig) -> None:
    lease, live = rig.admit(1, 64), Live(rig)
    await live.ask(lease.open())
    lease.pages.close()
    assert rig.pool.snapshot_counts().quarantined == 4
    rig.intake.close(1)
    assert rig.pool.snapshot_counts().free == rig.pool.pages
    await live.replies.aclose()


async def test_one_lease_has_one_stream_at_a_time(rig: Rig) -> None:
    lease, live = rig.admit(1, 16), Live(rig)
    await live.ask(lease.open())
    assert (await rig.refusal(lease.open())).label == "handoff_refused"
    assert (await live.ask(lease.block(0))).subject == Kind.BLOCK, "the first stream goes on"
    live.send(None)
    with pytest.raises(StopAsyncIteration):
        await live.reply()
    assert (await rig.exchange(*lease.everything()))[-1].subject == Kind.COMMIT


async def test_a_cancelled_stream_lets_go_of_its_lease(rig: Rig) -> None:
    lease, live = rig.admit(1, 32), Live(rig)
    await live.ask(lease.open())
    reading = asyncio.ensure_future(live.reply())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    await live.replies.aclose()
    assert rig.told == [ReceiveOpened(1, 1), ReceiveClosed(1, 1)]


async def test_the_engines_refusal_of_a_commit_reaches_the_sender(rig: Rig) -> None:
    _, waiting = await committing(rig)
    rig.intake.close(1, BatonError("the sequence failed", "x"))
    assert refused([await waiting]).message == "the sequence failed"
