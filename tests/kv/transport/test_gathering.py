"""Blocks gathered of several senders' shards: whole once all parts are in; all senders finish, or none."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.layout.bridge import bridge, shard_of, wire_layout
from baton.kv.layout.page import layout_for
from baton.kv.memory.host_pages import PageMemory
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.handoff_frames import Destination, HandoffFrames, Sender
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import BlocksReceived, Commit, ReceiveClosed, ReceiveOpened, ShipBlock
from baton.protos.errors import BatonError
from baton.protos.nouns import TokenRun
from tests.kv.transport.rigs import RIGS, Rig
from tests.kv.transport.test_handoffs import until

WHOLE = layout_for("float32", 2, 4, 8)
SHARDS, BLOCKS = 2, 5
PART = shard_of(WHOLE, 0, SHARDS)
LEASE, FINGERPRINT, FIRST = b"L" * 16, "f" * 64, TokenRun(0, (42,))
HASHES = [bytes([number]) * 32 for number in range(BLOCKS)]


class Gathering:
    """Two shards' pages in one memory, and a decode worker that has all heads."""

    def __init__(self) -> None:
        self.source = PageMemory.create(SHARDS * BLOCKS, PART.page_bytes)
        self.source.view()[:] = random.Random(1).randbytes(len(self.source.view()))
        self.memory = PageMemory.create(BLOCKS, WHOLE.page_bytes)
        self.told: list[Any] = []
        self.intake = Intake(self.memory, WHOLE, FINGERPRINT, self.tell)
        self.rig: Rig
        self.epoch = 1
        self.intake.register(IntakeLease(1, LEASE, 1, list(range(BLOCKS))[::-1], HASHES, 0))

    def tell(self, message: Any) -> None:
        self.told.append(message)
        if isinstance(message, Commit):
            self.intake.on_committed(message.key, message.epoch)

    def handoff(self, rank: int, shards: int = SHARDS) -> Handoff:
        """Returns the handoff of one shard's sender."""
        ours = shard_of(WHOLE, rank, shards)
        part = wire_layout(ours, WHOLE)
        sender = Sender(f"p{rank}", "m", FINGERPRINT, ours)
        to = Destination(self.rig.address, LEASE, self.epoch, "r", BLOCKS, 16)

        async def plan() -> WirePlan:
            return WirePlan(part, bridge(ours, part))

        return Handoff(self.rig.transport, self.source, sender, to, asyncio.get_running_loop().time, plan=plan)

    def ship(self, rank: int, *numbers: int) -> list[ShipBlock]:
        return [ShipBlock(n, rank * BLOCKS + n, HASHES[n], 16) for n in numbers]

    async def both(self) -> None:
        """Runs a complete handoff by all shards' senders."""
        handoffs = [self.handoff(rank) for rank in range(SHARDS)]
        for rank, handoff in enumerate(handoffs):
            handoff.ship(self.ship(rank, *range(BLOCKS)))
            handoff.commit(FIRST, 0)
        await asyncio.wait_for(asyncio.gather(*(handoff.run() for handoff in handoffs)), 30)

    def check(self) -> None:
        """Every page holds both shards' heads, each at its place."""
        for number in range(BLOCKS):
            parts = [
                np.frombuffer(self.source.page(rank * BLOCKS + number), np.uint32).reshape(-1, 2, 8)
                for rank in range(SHARDS)
            ]
            expected = np.concatenate(parts, axis=1)
            assert bytes(self.memory.page(BLOCKS - 1 - number)) == expected.tobytes()


@pytest.fixture(params=["loopback", "shm", "tcp"])
async def gathering(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Gathering]:
    made = Gathering()
    made.rig = await RIGS[request.param](made.intake.accept, made.source, tmp_path)
    yield made
    made.intake.close(1)
    await until(lambda: made.intake.open_streams == 0)
    await made.rig.transport.close()
    await made.rig.stop()


async def failure(running: asyncio.Future[Any]) -> BatonError:
    with pytest.raises(BatonError) as caught:
        await asyncio.wait_for(running, 30)
    return caught.value


async def test_pages_are_whole_and_the_engine_hears_of_one_handoff(gathering: Gathering) -> None:
    await gathering.both()
    gathering.check()
    kinds = [type(message) for message in gathering.told if not isinstance(message, BlocksReceived)]
    assert kinds == [ReceiveOpened, Commit, ReceiveClosed]
    reported = [n for message in gathering.told if isinstance(message, BlocksReceived) for n in message.blocks]
    assert sorted(reported) == list(range(BLOCKS))
    assert gathering.intake.received_blocks == BLOCKS


async def test_a_block_counts_when_its_last_part_is_in_and_not_before(gathering: Gathering) -> None:
    first, second = gathering.handoff(0), gathering.handoff(1)
    running = [asyncio.ensure_future(handoff.run()) for handoff in (first, second)]
    await until(lambda: gathering.intake.open_streams == 2)
    first.ship(gathering.ship(0, *range(BLOCKS)))
    first.commit(FIRST, 0)
    await until(lambda: gathering.intake.received_bytes == BLOCKS * PART.page_bytes)
    assert gathering.intake.received_blocks == 0
    second.ship(gathering.ship(1, 3))
    await until(lambda: gathering.intake.received_blocks == 1)
    assert not any(isinstance(message, Commit) for message in gathering.told)
    second.ship(gathering.ship(1, 0, 1, 2, 4))
    second.commit(FIRST, 0)
    await asyncio.wait_for(asyncio.gather(*running), 30)
    gathering.check()


async def test_when_one_sender_leaves_the_other_is_refused_and_a_later_epoch_finishes(gathering: Gathering) -> None:
    first, second = gathering.handoff(0), gathering.handoff(1)
    running = [asyncio.ensure_future(handoff.run()) for handoff in (first, second)]
    first.ship(gathering.ship(0, 0, 1))
    second.ship(gathering.ship(1, 1, 2))
    await until(lambda: gathering.intake.received_blocks == 1)
    running[1].cancel()
    assert "another shard" in (await failure(running[0])).message
    await until(lambda: ReceiveClosed(1, 1) in gathering.told)
    assert gathering.told.count(ReceiveClosed(1, 1)) == 1
    gathering.epoch = 2
    gathering.intake.rearm(1, 2)
    await gathering.both()
    gathering.check()


async def test_a_sender_of_all_heads_can_take_over_from_shards(gathering: Gathering) -> None:
    first = gathering.handoff(0)
    running = asyncio.ensure_future(first.run())
    first.ship(gathering.ship(0, 0, 1))
    await until(lambda: gathering.intake.received_bytes == 2 * PART.page_bytes)
    running.cancel()
    await until(lambda: ReceiveClosed(1, 1) in gathering.told)
    gathering.epoch = 2
    gathering.intake.rearm(1, 2)
    source = PageMemory.attach(os.dup(gathering.source.fd), BLOCKS, WHOLE.page_bytes)
    whole = Handoff(
        gathering.rig.transport, source, Sender("p", "m", FINGERPRINT, WHOLE),
        Destination(gathering.rig.address, LEASE, 2, "r", BLOCKS, 16), asyncio.get_running_loop().time,
    )  # fmt: skip
    whole.ship([ShipBlock(n, n, HASHES[n], 16) for n in range(BLOCKS)])
    whole.commit(FIRST, 0)
    await asyncio.wait_for(whole.run(), 30)
    pages = [bytes(gathering.memory.page(BLOCKS - 1 - n)) for n in range(BLOCKS)]
    assert pages == [bytes(source.page(n)) for n in range(BLOCKS)]


async def test_the_same_shard_twice_or_another_number_of_senders_is_refused_by_name(gathering: Gathering) -> None:
    first = gathering.handoff(0)
    running = asyncio.ensure_future(first.run())
    await until(lambda: gathering.intake.open_streams == 1)
    assert "already open" in (await failure(asyncio.ensure_future(gathering.handoff(0).run()))).message
    other = await failure(asyncio.ensure_future(gathering.handoff(3, 4).run()))
    assert "2 senders bring this lease, not 4" in other.message
    assert gathering.intake.open_streams == 1, "the stream that was there first goes on"
    running.cancel()


async def test_a_stream_cannot_bring_another_shard_than_it_opened_for(
    gathering: Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gathering.handoff(0)
    first.ship(gathering.ship(0, 0))
    blocks = HandoffFrames.blocks

    def of_another_shard(self: HandoffFrames, batch: Any, wants_ack: bool) -> Any:
        frame, payload = blocks(self, batch, wants_ack)
        return msgspec.structs.replace(frame, shard_rank=1), payload

    monkeypatch.setattr(HandoffFrames, "blocks", of_another_shard)
    error = await failure(asyncio.ensure_future(first.run()))
    assert error.label == "layout_mismatch"
    assert "is for shard" in error.message
    assert gathering.intake.received_blocks == 0
