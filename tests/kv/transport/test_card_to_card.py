"""Tests handoffs from one card's pages to another's: right bytes there and on the host, or a refusal by name."""

from __future__ import annotations

import asyncio
import ctypes
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from baton.kv.layout.bridge import bridge, codec_of, land
from baton.kv.memory.cuda_driver import Driver
from baton.kv.transport import cuda_ipc
from baton.kv.transport.cuda_ipc import CudaIpcTransport, IpcStream
from baton.kv.wire import frames
from baton.kv.wire.frames import Frame
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import BlocksReceived
from baton.protos.errors import CorruptFrame
from tests.kv.transport.cards import Cards, known, take_card
from tests.kv.transport.rigs import Rig, stand_in_driver
from tests.kv.transport.test_handoffs import (
    BLOCKS,
    FINGERPRINT,
    FIRST,
    LAYOUT,
    LEASE,
    RECEIVERS,
    until,
)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return take_card(monkeypatch)


@pytest.fixture
async def pair(card: Driver, tmp_path: Path) -> AsyncIterator[Cards]:
    made = Cards(card)
    server, address = cuda_ipc.listen(str(tmp_path / "gpu"), made.intake.accept, made.memory.device)
    made.rig = Rig(CudaIpcTransport(40 * LAYOUT.page_bytes, made.source.device), address, asyncio.Event().wait)
    made.admit()
    yield made
    await made.rig.transport.close()
    server.close()
    await asyncio.sleep(0.01)
    made.ours.close()
    made.theirs.close()
    await until(lambda: known() == 0)  # else the card's memory leaks


async def test_blocks_go_from_card_to_card_and_the_hosts_pages_follow(pair: Cards) -> None:
    await pair.handed()
    assert pair.landed() == pair.sent()
    assert pair.arrived() == pair.sent(), "tiers and other transports read the host's"
    assert pair.said_resident() == set(range(BLOCKS))
    assert not set(pair.sent()) & {bytes(pair.source.page(page)) for page in range(BLOCKS)}
    await pair.end()


async def test_one_launch_takes_a_frame_however_many_blocks_it_has(
    pair: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier, counts = pair.ours.pages.copier, list[int]()
    start = copier.start
    monkeypatch.setattr(copier, "start", lambda to, *rest: (counts.append(len(to)), start(to, *rest))[1])
    await pair.handed()
    assert sorted(counts) == [2, 2, 10, 10], "a frame of 10, a quarter of the ring, and one of 2; each end once"
    await pair.end()


async def test_blocks_that_are_not_on_the_senders_card_go_by_its_host_and_land_on_ours(pair: Cards) -> None:
    pair.resident = set()  # cached ones, which leave before their first step
    await pair.handed()
    want = [bytes(pair.source.page(page)) for page in pair.order]
    assert pair.landed() == pair.arrived() == want
    assert pair.said_resident() == set(range(BLOCKS))
    await pair.end()


@pytest.mark.parametrize("which", ["ours", "theirs"])
async def test_one_end_alone_may_have_its_pages_on_the_card(card: Driver, tmp_path: Path, which: str) -> None:
    pair = Cards(card)
    sender, receiver = (pair.source.device, None) if which == "ours" else (None, pair.memory.device)
    server, address = cuda_ipc.listen(str(tmp_path / "gpu"), pair.intake.accept, receiver)
    pair.rig = Rig(CudaIpcTransport(pages=sender), address, asyncio.Event().wait)
    pair.admit()
    await pair.handed()
    assert pair.arrived() == (pair.sent() if sender else [bytes(pair.source.page(page)) for page in pair.order])
    assert pair.said_resident() == (set() if sender else set(range(BLOCKS)))
    await pair.end()
    await pair.rig.transport.close()
    server.close()
    pair.ours.close()
    pair.theirs.close()


async def test_a_byte_flipped_in_the_ring_is_refused_and_counts_for_nothing(
    pair: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = IpcStream._filled

    async def flipped(stream: IpcStream, frame: Frame, payload: Any, begin: int) -> Frame:
        made = await filled(stream, frame, payload, begin)
        if made.blocks:
            at = ctypes.c_ubyte.from_address(stream._ring.at + made.offsets[-1] + 77)
            at.value ^= 4
        return made

    monkeypatch.setattr(IpcStream, "_filled", flipped)
    handoff = pair.handoff()
    handoff.ship(pair.ship(*range(BLOCKS)))
    with pytest.raises(CorruptFrame, match="was damaged on the way") as refusal:
        await asyncio.wait_for(handoff.run(), 30)
    assert refusal.value.param == "checksum"
    assert not any(isinstance(said, BlocksReceived) for said in pair.told)
    await pair.end()


@pytest.mark.parametrize("kind", ["another dtype", "int8"])
async def test_blocks_that_are_bridged_go_by_the_host_and_are_said_to_lie_where_they_do(
    card: Driver, tmp_path: Path, kind: str
) -> None:
    """Blocks of another dtype land on the card as they came; under a codec they are expanded on the host alone."""
    theirs = RECEIVERS[kind]
    pair = Cards(card, theirs)
    computed = np.random.default_rng(5).normal(size=BLOCKS * LAYOUT.page_bytes // 4).astype(np.float32)
    pair.source.view()[:] = computed.tobytes()
    server, address = cuda_ipc.listen(str(tmp_path / "gpu"), pair.intake.accept, pair.memory.device)
    pair.rig = Rig(CudaIpcTransport(pages=pair.source.device), address, asyncio.Event().wait)
    pair.admit()
    made = bridge(LAYOUT, theirs)
    assert made is not None

    async def plan() -> WirePlan:
        return WirePlan(theirs, made, tuple(pair.hashes))

    to = Destination(address, LEASE, 1, "r", BLOCKS, 13)
    clock = asyncio.get_running_loop().time
    handoff = Handoff(pair.rig.transport, pair.source, Sender("p0", "m", FINGERPRINT, LAYOUT), to, clock, plan=plan)
    handoff.ship(pair.ship(*range(BLOCKS)))
    handoff.commit(FIRST, 0)
    await asyncio.wait_for(handoff.run(), 30)
    for index, got in enumerate(pair.arrived()):
        page, converted = (
            memoryview(bytearray(theirs.page_bytes)),
            made.convert(pair.source.page(pair.order[index])),
        )
        if codec_of(theirs):
            land(converted, page, theirs)
        else:
            page[:] = converted
        assert got == bytes(page)
    if codec_of(theirs):
        assert pair.said_resident() == set()
    else:
        assert pair.landed() == pair.arrived()
    await pair.end()
    await pair.rig.transport.close()
    server.close()
    pair.ours.close()
    pair.theirs.close()


async def test_what_an_earlier_epoch_brought_stays_while_a_copy_of_it_comes(pair: Cards) -> None:
    stream = await pair.rig.transport.connect(pair.rig.address)
    await stream.send(pair.opening())
    await stream.send(*_resident(pair, 0, 1, 2))
    raw = await stream.receive()
    while raw is not None and frames.decode(raw).subject != frames.Kind.BLOCK:
        raw = await stream.receive()
    await stream.close()
    pair.epoch = 2
    pair.intake.rearm(1, 2)
    for index in range(3):
        pair.ours.write(pair.order[index], b"?" * LAYOUT.page_bytes)  # computed anew, with other bits
    before = pair.landed()[:3]
    await pair.handed()
    assert pair.landed()[:3] == before == pair.arrived()[:3]
    assert pair.arrived()[3:] == pair.sent()[3:]
    assert pair.said_resident() == {0, 1, 2, 10, 11}, "a frame with a copy in it lands by the host alone"
    assert pair.landed()[10:] == pair.sent()[10:]
    await pair.end()


def _resident(pair: Cards, *indices: int) -> tuple[Frame, list[memoryview]]:
    frame, payload = pair.frame(*indices)
    bare = tuple(msgspec.structs.replace(block, checksum=None) for block in frame.blocks)
    return msgspec.structs.replace(frame, flags=frame.flags | frames.RESIDENT, blocks=bare), payload


async def test_many_frames_through_a_small_ring_keep_their_order_whichever_way_each_goes(
    card: Driver, tmp_path: Path
) -> None:
    pair, rng = Cards(card), random.Random(5)
    server, address = cuda_ipc.listen(str(tmp_path / "gpu"), pair.intake.accept, pair.memory.device)
    pair.rig = Rig(CudaIpcTransport(3 * LAYOUT.page_bytes, pair.source.device), address, asyncio.Event().wait)
    for _ in range(6):
        pair.admit()
        pair.resident = {block for block in range(BLOCKS) if rng.random() < 0.5}
        await pair.handed()
        want = [
            pair.ours.page(page) if index in pair.resident else bytes(pair.source.page(page))
            for index, page in enumerate(pair.order)
        ]
        assert pair.landed() == pair.arrived() == want
        await pair.end()
    await pair.rig.transport.close()
    server.close()
    pair.ours.close()
    pair.theirs.close()


async def test_from_process_to_process_the_bits_are_the_same(card: Driver, tmp_path: Path) -> None:
    pair = Cards(card)
    command = [sys.executable, "-m", "tests.kv.transport.far_card", stand_in_driver(), str(tmp_path / "gpu")]
    command += [block.hex() for block in pair.hashes]
    root = Path(__file__).resolve().parents[3]
    far = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    assert far.stdin is not None
    assert far.stdout is not None
    address = (await asyncio.to_thread(far.stdout.readline)).strip()
    pair.rig, pair.epoch = Rig(CudaIpcTransport(pages=pair.source.device), address, asyncio.Event().wait), 1
    await pair.handed()
    await pair.rig.transport.close()
    said, _ = await asyncio.to_thread(far.communicate)
    assert said.split() == [str(BLOCKS), "True", xxhash.xxh3_64_hexdigest(b"".join(pair.sent()))]
    pair.ours.close()
    pair.theirs.close()
