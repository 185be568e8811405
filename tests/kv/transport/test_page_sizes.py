"""Whole handoffs between workers whose pages hold more tokens or fewer, over every transport that is quick."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.layout import prefix
from baton.kv.layout.bridge import bridge, land, run_of, runs_of, with_codec
from baton.kv.layout.page import in_pages_of, layout_for
from baton.kv.layout.repaging import Repaging
from baton.kv.memory.host_pages import PageMemory
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import Commit, ShipBlock
from baton.protos.errors import BatonError
from baton.protos.nouns import KvLayout, TokenRun
from tests.kv.transport.rigs import RIGS, Rig

BASE = layout_for("float32", 2, 2, 8)
TOKENS, FINGERPRINT, LEASE = 16 * 13 + 5, "f" * 64, b"L" * 16
PAIRS = {
    "16 to 32": (16, 32),
    "32 to 16": (32, 16),
    "48 to 32": (48, 32),
    "32 to 48": (32, 48),
    "16 to 256": (16, 256),
}


class Sizes:
    """A prompt in pages of one size, and a decode worker whose pages are of another; all pages are scattered."""

    def __init__(self, ours: KvLayout, theirs: KvLayout) -> None:
        self.ours, self.theirs = ours, theirs
        rng = random.Random(7)
        self.blocks, self.wanted = (-(-TOKENS // size) for size in (ours.block_tokens, theirs.block_tokens))
        self.source = PageMemory.create(self.blocks, ours.page_bytes)
        values = np.random.default_rng(3).normal(size=self.blocks * ours.page_bytes // 4).astype(np.float32)
        self.source.view()[:] = values.tobytes()
        self.order = rng.sample(range(self.blocks), self.blocks)
        self.memory = PageMemory.create(self.wanted, theirs.page_bytes)
        self.pages = rng.sample(range(self.wanted), self.wanted)
        self.root = prefix.root(FINGERPRINT, theirs.fidelity)
        self.hashes = prefix.chain(self.root, range(TOKENS), theirs.block_tokens)
        self.told: list[Any] = []
        self.intake = Intake(self.memory, theirs, FINGERPRINT, self.tell)
        self.rig: Rig

    def tell(self, message: Any) -> None:
        self.told.append(message)
        if isinstance(message, Commit):
            self.intake.on_committed(message.key, message.epoch)

    def admit(self, held: int = 0) -> None:
        self.intake.register(IntakeLease(1, LEASE, 1, self.pages, self.hashes, held))

    def handoff(self, held: int = 0, received: tuple[int, ...] = (), hashes: list[bytes] | None = None) -> Handoff:
        made, paging = bridge(self.ours, self.theirs), Repaging(self.ours, self.theirs, TOKENS, held, received)

        async def plan() -> WirePlan:
            return WirePlan(self.theirs, made, tuple(hashes or self.hashes), paging)

        sender = Sender("p0", "m", FINGERPRINT, self.ours)
        to = Destination(self.rig.address, LEASE, 1, "r", self.blocks, 5)
        return Handoff(self.rig.transport, self.source, sender, to, asyncio.get_running_loop().time, plan=plan)

    def ship(self) -> list[ShipBlock]:
        return [ShipBlock(i, page, b"ours" * 8, self.ours.block_tokens) for i, page in enumerate(self.order)]

    def runs(self, memory: PageMemory, pages: list[int], layout: KvLayout) -> list[bytes]:
        found = [bytes(run) for page in pages for run in runs_of(memory.page(page), layout)]
        return found[: -(-TOKENS // 16)]

    async def whole(self) -> None:
        handoff = self.handoff()
        handoff.ship(self.ship())
        handoff.commit(TokenRun(0, (42,)), 0)
        report = await asyncio.wait_for(handoff.run(), 20)
        assert report.shipped_blocks == self.wanted

    async def end(self) -> None:
        self.intake.close(1)
        await self.rig.transport.close()
        await self.rig.stop()


async def rigged(ours: KvLayout, theirs: KvLayout, name: str, folder: Path) -> Sizes:
    made = Sizes(ours, theirs)
    made.rig = await RIGS[name](made.intake.accept, made.source, folder)
    return made


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", [name for name in RIGS if name != "nccl"])
async def test_every_token_lies_where_the_receiver_looks_for_it(name: str, pair: str, tmp_path: Path) -> None:
    ours, theirs = (in_pages_of(BASE, size) for size in PAIRS[pair])
    sizes = await rigged(ours, theirs, name, tmp_path)
    sizes.admit()
    await sizes.whole()
    assert sizes.runs(sizes.memory, sizes.pages, theirs) == sizes.runs(sizes.source, sizes.order, ours)
    assert sizes.intake.received_blocks == sizes.wanted
    await sizes.end()


@pytest.mark.parametrize("name", ["shm", "tcp"])
async def test_another_dtype_comes_in_pages_of_another_size(name: str, tmp_path: Path) -> None:
    theirs = in_pages_of(layout_for("bfloat16", 2, 2, 8), 48)
    sizes = await rigged(BASE, theirs, name, tmp_path)
    sizes.admit()
    await sizes.whole()
    made = bridge(BASE, run_of(theirs))
    assert made is not None
    expected = [bytes(made.convert(memoryview(run))) for run in sizes.runs(sizes.source, sizes.order, BASE)]
    assert sizes.runs(sizes.memory, sizes.pages, theirs) == expected
    await sizes.end()


@pytest.mark.parametrize("pair", ["16 to 32", "32 to 16"])
async def test_coded_blocks_come_in_pages_of_another_size(pair: str, tmp_path: Path) -> None:
    ours, theirs = (in_pages_of(BASE, size) for size in PAIRS[pair])
    theirs = with_codec(theirs, "int8")
    sizes = await rigged(ours, theirs, "tcp", tmp_path)
    sizes.admit()
    await sizes.whole()
    one, expected = run_of(theirs), []
    made = bridge(run_of(ours), one)
    assert made is not None
    for run in sizes.runs(sizes.source, sizes.order, ours):
        page = memoryview(bytearray(one.page_bytes))
        land(made.convert(memoryview(run)), page, one)
        expected.append(bytes(page))
    assert sizes.runs(sizes.memory, sizes.pages, theirs) == expected
    await sizes.end()


async def test_what_the_receiver_has_already_is_not_sent(tmp_path: Path) -> None:
    ours, theirs = BASE, in_pages_of(BASE, 32)
    sizes = await rigged(ours, theirs, "tcp", tmp_path)
    sizes.admit(held=2)
    first = sizes.handoff(held=2)
    first.ship(sizes.ship()[4:9])  # blocks 2 and 3 of the receiver's, and half of its block 4
    running = asyncio.ensure_future(first.run())
    async with asyncio.timeout(30):
        while sizes.intake.received_blocks < 2:
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait({running})
    paging = Repaging(ours, theirs, TOKENS, 2, (2, 3))
    assert paging.wanted() == (8, ())
    second = sizes.handoff(2, (2, 3))
    second.ship(sizes.ship()[8:])
    second.commit(TokenRun(0, (42,)), 0)
    report = await asyncio.wait_for(second.run(), 30)
    assert report.shipped_blocks == sizes.wanted - 4
    found, sent = sizes.runs(sizes.memory, sizes.pages, theirs), sizes.runs(sizes.source, sizes.order, ours)
    assert found[4:] == sent[4:]
    await sizes.end()


async def test_hashes_of_our_own_chain_are_refused(tmp_path: Path) -> None:
    sizes = await rigged(BASE, in_pages_of(BASE, 32), "tcp", tmp_path)
    sizes.admit()
    handoff = sizes.handoff(hashes=prefix.chain(sizes.root, range(TOKENS))[: sizes.wanted])
    handoff.ship(sizes.ship())
    with pytest.raises(BatonError, match="it is of other tokens"):
        await asyncio.wait_for(handoff.run(), 30)
    await sizes.end()
