"""Whole handoffs over every transport: right bytes in right pages, or a typed refusal and not one page leaked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.layout import prefix
from baton.kv.layout.bridge import bridge, codec_of, land, with_codec
from baton.kv.layout.page import layout_for
from baton.kv.memory import block_sums
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PageLease, PagePool
from baton.kv.transport.nccl import NcclTransport
from baton.kv.wire import control, frames
from baton.kv.wire.base import HandoffStream, Sink
from baton.kv.wire.frames import Block, Frame, Kind
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import BlocksReceived, Commit, ReceiveClosed, ReceiveOpened, ShipBlock
from baton.protos.errors import BatonError
from baton.protos.nouns import KvLayout, TokenRun
from tests.kv.transport.rigs import RIGS, Rig

LAYOUT = layout_for("float32", 2, 2, 32)
FINGERPRINT = "f" * 64
LEASE = b"L" * 16
BLOCKS = 12
FIRST = TokenRun(0, (42,))


class Pair:
    """A prefill worker's pages and a decode worker with a real pool; block order, and both page orders, differ."""

    def __init__(self, seed: int = 1, layout: KvLayout = LAYOUT) -> None:
        rng = random.Random(seed)
        self.source = PageMemory.create(BLOCKS, LAYOUT.page_bytes)
        self.source.view()[:] = random.Random(-seed).randbytes(BLOCKS * LAYOUT.page_bytes)
        self.memory = PageMemory.create(2 * BLOCKS, layout.page_bytes)
        self.pool = PagePool(2 * BLOCKS)
        self.hashes = prefix.chain(prefix.root(FINGERPRINT, layout.fidelity), range(16 * BLOCKS - 3))
        self.order = rng.sample(range(BLOCKS), BLOCKS)
        self.told: list[Any] = []
        self.intake = Intake(self.memory, layout, FINGERPRINT, self.tell)
        scattered = [self.pool.open([], 1) for _ in range(2 * BLOCKS)]
        for lease in rng.sample(scattered, 2 * BLOCKS):
            lease.close()
        self.rig: Rig
        self.lease: PageLease
        self.epoch = 0

    def admit(self) -> None:
        """A lease of all blocks, in force."""
        self.lease = self.pool.open([], BLOCKS)
        self.epoch = 1
        self.intake.register(IntakeLease(1, LEASE, 1, self.lease.pages, self.hashes, 0))

    def tell(self, message: Any) -> None:
        self.told.append(message)
        if isinstance(message, ReceiveOpened):
            self.lease.hold()
        elif isinstance(message, ReceiveClosed):
            self.lease.release()
        elif isinstance(message, Commit):
            self.intake.on_committed(message.key, message.epoch)

    def ship(self, *indices: int) -> list[ShipBlock]:
        return [ShipBlock(i, self.order[i], self.hashes[i], 16) for i in indices]

    def handoff(self, **changes: Any) -> Handoff:
        sender = msgspec.structs.replace(Sender("p0", "m", FINGERPRINT, LAYOUT), **changes)
        to = Destination(self.rig.address, LEASE, self.epoch, "r", BLOCKS, 13)
        return Handoff(self.rig.transport, self.source, sender, to, asyncio.get_running_loop().time)

    def frame(self, *indices: int, **changes: Any) -> tuple[Frame, list[memoryview]]:
        """A right BLOCK frame, but for ``changes``."""
        payload = [self.source.page(self.order[i]) for i in indices]
        sums = map(block_sums.checksum, payload)
        table = tuple(Block(i, self.hashes[i], said) for i, said in zip(indices, sums, strict=True))
        offsets = tuple(self.order[i] * LAYOUT.page_bytes for i in indices)
        fields = {"lease": LEASE, "epoch": self.epoch, "flags": 1, "unit": LAYOUT.page_bytes, "blocks": table}
        return Frame(Kind.BLOCK, offsets=offsets, **fields | changes), payload

    def block(self, index: int, called: int) -> Block:
        """Block ``index``, its bytes right, under another number and hash."""
        return Block(called, b"?" * 32, block_sums.checksum(self.source.page(self.order[index])))

    def opening(self) -> Frame:
        said = control.Opening("r", LAYOUT, "p0", BLOCKS, 13, "m", FINGERPRINT)
        return Frame(Kind.OPEN, LEASE, self.epoch, control.encode_opening(said))

    async def refusal(self, *sent: tuple[Frame, list[memoryview]]) -> BatonError:
        """Returns the error that a sender gets after a right opening followed by ``sent``."""
        stream = await self.rig.transport.connect(self.rig.address)
        try:
            for frame, payload in ((self.opening(), []), *sent):
                await stream.send(frame, payload)
            return await error_of(stream)
        finally:
            await stream.close()

    def arrived(self) -> list[bytes]:
        return [bytes(self.memory.page(page)) for page in self.lease.pages]

    def sent(self) -> list[bytes]:
        return [bytes(self.source.page(page)) for page in self.order]

    async def whole(self) -> None:
        """A complete handoff, right to the last byte."""
        handoff = self.handoff()
        handoff.ship(self.ship(*range(BLOCKS)))
        handoff.commit(FIRST, 0)
        await asyncio.wait_for(handoff.run(), 30)
        assert self.arrived() == self.sent()

    async def end(self) -> None:
        """The request is over: nothing may be left."""
        self.intake.close(1)
        self.lease.close()
        await until(lambda: self.intake.open_streams == 0)
        await until(lambda: not self.pool.snapshot_counts().quarantined)
        self.pool.check()
        counts = self.pool.snapshot_counts()
        assert (counts.leased, counts.quarantined, counts.leases) == (0, 0, 0), "pages leaked"


async def until(true: Callable[[], bool], within_s: float = 30) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.001)


async def error_of(stream: HandoffStream) -> BatonError:
    """The typed error that a stream ends in."""
    while (raw := await asyncio.wait_for(stream.receive(), 30)) is not None:
        frame = frames.decode(raw)
        if frame.kind is Kind.ERROR:
            return control.decode_error(frame.body)
        assert frame.kind is Kind.ACK
        assert frame.subject != Kind.COMMIT, "not refused"
    raise AssertionError("the stream ended without a word")


@asynccontextmanager
async def admitted(name: str, folder: Path) -> AsyncIterator[Pair]:
    """Both sides of a handoff over the rig of that name, its lease in force; afterwards nothing may be left."""
    made = Pair()
    made.rig = await RIGS[name](made.intake.accept, made.source, folder)
    made.admit()
    yield made
    await made.end()
    await made.rig.transport.close()
    await made.rig.stop()


@pytest.fixture(params=RIGS)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with admitted(request.param, tmp_path) as made:
        yield made


async def test_every_block_lands_in_its_own_page_whatever_the_block_tables(pair: Pair) -> None:
    await pair.whole()
    assert sorted(pair.lease.pages) != pair.lease.pages
    assert pair.told[-2:] == [Commit(1, 1, FIRST, 0), ReceiveClosed(1, 1)]


@pytest.mark.parametrize("step", ["open", "first block", "half", "all blocks"])
async def test_a_sender_that_aborts_leaves_nothing_and_another_can_finish(pair: Pair, step: str) -> None:
    handoff = pair.handoff()
    count = {"open": 0, "first block": 1, "half": BLOCKS // 2, "all blocks": BLOCKS}[step]
    handoff.ship(pair.ship(*range(count)))
    running = asyncio.ensure_future(handoff.run())
    await until(lambda: pair.intake.received_blocks == count and bool(pair.told))
    running.cancel()
    await asyncio.wait({running})
    await until(lambda: pair.told[-1] == ReceiveClosed(1, 1))
    pair.epoch = 2
    pair.intake.rearm(1, 2)
    await pair.whole()


@pytest.mark.parametrize("step", ["open", "first block", "half", "all blocks"])
async def test_a_receiver_that_aborts_at_any_step_is_heard_at_once(pair: Pair, step: str) -> None:
    handoff = pair.handoff()
    count = {"open": 0, "first block": 1, "half": BLOCKS // 2, "all blocks": BLOCKS}[step]
    handoff.ship(pair.ship(*range(count)))
    running = asyncio.ensure_future(handoff.run())
    await until(lambda: pair.intake.received_blocks == count and bool(pair.told))
    pair.intake.close(1)
    assert pair.told[-1] == ReceiveClosed(1, 1)
    with pytest.raises(BatonError) as caught:
        await asyncio.wait_for(running, 30)
    assert caught.value.label == "lease_unknown"


async def test_a_receiver_that_dies_is_a_lost_worker_and_lets_go_of_its_pages(pair: Pair) -> None:
    handoff = pair.handoff()
    handoff.ship(pair.ship(0, 1))
    running = asyncio.ensure_future(handoff.run())
    await until(lambda: pair.intake.received_blocks == 2)
    await pair.rig.stop()
    with pytest.raises(BatonError) as caught:
        await asyncio.wait_for(running, 30)
    assert caught.value.label == "worker_lost"
    await until(lambda: pair.told[-1] == ReceiveClosed(1, 1))


WRONG: dict[str, tuple[str, Callable[[Pair], list[tuple[Frame, list[memoryview]]]]]] = {
    "a block twice": ("foreign_block", lambda p: [p.frame(0), p.frame(0)]),
    "a late frame, of an epoch that is over": ("stale_epoch", lambda p: [p.frame(0, epoch=0)]),
    "a frame of an epoch to come": ("stale_epoch", lambda p: [p.frame(0, epoch=2)]),
    "another's lease": ("lease_unknown", lambda p: [p.frame(0, lease=b"?" * 16)]),
    "a foreign block": ("foreign_block", lambda p: [p.frame(0, blocks=(p.block(0, 0),))]),
    "a block beyond the prompt": ("foreign_block", lambda p: [p.frame(0, blocks=(p.block(0, 99),))]),
    "another shard": ("layout_mismatch", lambda p: [p.frame(0, shard_rank=1)]),
    "bytes of another block": ("corrupt_frame", lambda p: [(p.frame(0)[0], p.frame(1)[1])]),
    "a commit too early": ("handoff_refused", lambda p: [p.frame(0), (Frame(Kind.COMMIT, LEASE, 1), [])]),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_frame_is_refused_by_its_own_type(pair: Pair, name: str) -> None:
    label, wrong = WRONG[name]
    sent = wrong(pair)
    if name == "bytes of another block":  # shm: the bytes lie where the offsets say
        sent = [(msgspec.structs.replace(sent[0][0], offsets=pair.frame(1)[0].offsets), sent[0][1])]
    assert (await pair.refusal(*sent)).label == label
    assert pair.intake.refusals[label] == 1
    assert not [m for m in pair.told if isinstance(m, Commit)]
    pair.epoch = 2
    pair.intake.rearm(1, 2)
    await pair.whole()


async def test_another_layout_is_refused_before_any_byte_moves(pair: Pair) -> None:
    handoff = pair.handoff(layout=layout_for("bfloat16", 2, 2, 64))  # in pages of as many bytes
    handoff.ship(pair.ship(0))
    with pytest.raises(BatonError, match="dtype: sender 'bfloat16', receiver 'float32'"):
        await asyncio.wait_for(handoff.run(), 30)
    assert not pair.told
    assert not any(any(pair.memory.page(page)) for page in pair.lease.pages)


@pytest.mark.parametrize("count", [80, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
async def test_one_flipped_bit_is_refused_wherever_it_is(
    pair: Pair, count: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Damages half of the frames anywhere in header and body, the other half in a block's bytes."""
    rng, encode = random.Random(3), frames.encode
    if isinstance(pair.rig.transport, NcclTransport) or "TLS" in request.node.name:
        count //= 5  # each refusal costs a channel, or handshakes for frames that are those of tcp and grpc

    def damaged(frame: Frame) -> bytes:
        raw = bytearray(encode(frame))
        if frame.kind is Kind.BLOCK:
            bit = rng.randrange(8 * len(raw))
            raw[bit // 8] ^= 1 << bit % 8
        return bytes(raw)

    for number in range(count):
        block = number % BLOCKS
        frame, payload = pair.frame(block)
        with monkeypatch.context() as patch:
            if number % 2:
                patch.setattr(frames, "encode", damaged)
                error = await pair.refusal((frame, payload))
            else:
                at, bit = rng.randrange(len(payload[0])), 1 << rng.randrange(8)
                payload[0][at] ^= bit
                error = await pair.refusal((frame, payload))
                payload[0][at] ^= bit
        assert error.label == "corrupt_frame"
        await until(lambda: pair.intake.open_streams == 0)
    assert pair.intake.refusals == {"corrupt_frame": count}
    assert not [m for m in pair.told if isinstance(m, BlocksReceived | Commit)], "nothing damaged ever counts"
    await pair.whole()


async def test_a_receiver_that_is_slow_slows_only_its_own_sender(pair: Pair, tmp_path: Path) -> None:
    """A second decode worker that answers nothing: its sender waits within its window, the other's doesn't."""
    stuck, other = Pair(seed=2), tmp_path / "other"
    other.mkdir()
    stuck.admit()
    kind = next(kind for kind in RIGS.values() if kind.__name__ == "tcp_rig")
    slow = await kind(lambda line: Stuck(stuck.intake.accept(line)), stuck.source, other)
    stuck.rig = slow
    waiting = stuck.handoff()
    waiting.ship(stuck.ship(*range(BLOCKS)))
    running = asyncio.ensure_future(waiting.run())
    await asyncio.wait_for(pair.whole(), 30)
    assert not running.done()
    running.cancel()
    await asyncio.wait({running})
    await slow.transport.close()
    await slow.stop()
    await stuck.end()


class Stuck:
    """A Sink in front of another that lets blocks land and then forgets them."""

    def __init__(self, sink: Sink) -> None:
        self.take, self.place, self.over = sink.take, sink.place, sink.over

    def landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        """Nobody hears of it."""


# ---- receivers that lay KV out otherwise ---------------------------------------------------------------

RECEIVERS = {
    "another dtype": layout_for("bfloat16", 2, 2, 32),
    "half of the heads": msgspec.structs.replace(layout_for("float32", 2, 1, 32), shard_rank=1, shard_count=2),
    "int8": with_codec(LAYOUT, "int8"),
    "fp8 of bfloat16": with_codec(layout_for("bfloat16", 2, 2, 32), "fp8"),
}


@pytest.mark.parametrize("kind", RECEIVERS)
@pytest.mark.parametrize("name", ["shm", "tcp, 3 lanes", "grpc"])
async def test_a_receiver_that_differs_gets_its_own_kind_of_page(kind: str, name: str, tmp_path: Path) -> None:
    theirs = RECEIVERS[kind]
    pair = Pair(layout=theirs)
    computed = np.random.default_rng(5).normal(size=pair.source.pages * LAYOUT.page_bytes // 4).astype(np.float32)
    pair.source.view()[:] = computed.tobytes()
    pair.rig = await RIGS[name](pair.intake.accept, pair.source, tmp_path)
    pair.admit()
    made = bridge(LAYOUT, theirs)
    assert made is not None

    async def plan() -> WirePlan:
        return WirePlan(theirs, made, tuple(pair.hashes))

    sender, to = Sender("p0", "m", FINGERPRINT, LAYOUT), Destination(pair.rig.address, LEASE, 1, "r", BLOCKS, 13)
    handoff = Handoff(pair.rig.transport, pair.source, sender, to, asyncio.get_running_loop().time, plan=plan)
    blocks = [msgspec.structs.replace(b, hash=b"ours" * 8) for b in pair.ship(*range(BLOCKS))]
    handoff.ship(blocks)
    handoff.commit(FIRST, 0)
    report = await asyncio.wait_for(handoff.run(), 30)
    assert report.shipped_bytes == BLOCKS * made.unit
    for index, got in enumerate(pair.arrived()):
        page = memoryview(bytearray(theirs.page_bytes))
        converted = made.convert(pair.source.page(pair.order[index]))
        if codec_of(theirs):
            land(converted, page, theirs)
        else:
            page[:] = converted
        assert got == bytes(page)
    await pair.end()
    await pair.rig.transport.close()
    await pair.rig.stop()
