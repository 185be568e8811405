"""The second version of the frames over tcp, checksums behind the blocks' bytes: with peers of the first version on
either side, with bits flipped on the way, and with a page that counts only once its checksum is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.kv.memory import block_sums
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import tcp
from baton.kv.wire import control, frames
from baton.kv.wire.base import HandoffStream
from baton.kv.wire.frames import Block, Frame, Kind
from baton.protos.channel import BlocksReceived, Commit
from baton.protos.errors import CorruptFrame
from tests.kv.transport import first_version
from tests.kv.transport.rigs import RIGS, Rig
from tests.kv.transport.test_handoffs import (
    BLOCKS,
    FINGERPRINT,
    FIRST,
    LAYOUT,
    LEASE,
    Pair,
    admitted,
    error_of,
    until,
)

TCP = [name for name in RIGS if name.startswith("tcp")]
HASHES = bytes(range(32))


def bare(pair: Pair, *indices: int) -> tuple[Frame, list[memoryview]]:
    """A right BLOCK frame whose checksums are left to the transport."""
    frame, payload = pair.frame(*indices)
    table = tuple(Block(block.index, block.hash) for block in frame.blocks)
    return Frame(Kind.BLOCK, LEASE, pair.epoch, flags=1, unit=frame.unit, blocks=table), payload


async def opened(pair: Pair, address: str = "") -> HandoffStream:
    """A stream that was opened, and greeted: the greeting comes before the acknowledgement."""
    stream = await pair.rig.transport.connect(address or pair.rig.address)
    await stream.send(pair.opening())
    raw = await asyncio.wait_for(stream.receive(), 30)
    assert raw is not None
    assert frames.decode(raw).kind is Kind.ACK
    return stream


@pytest.fixture(params=TCP)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with admitted(request.param, tmp_path) as made:
        yield made


# ---- what goes over the wire ---------------------------------------------------------------------------


def test_the_wire_form_of_checksums_that_follow_is_fixed() -> None:
    frame = Frame(Kind.BLOCK, flags=frames.TRAILING, unit=5, blocks=(Block(7, HASHES), Block(8, HASHES)))
    data = frames.encode(frame)
    assert data[5] == 4
    assert data[64:] == (7).to_bytes(4, "little") + HASHES + (8).to_bytes(4, "little") + HASHES
    assert frames.decode(data) == frame
    assert frames.trailer([3, 4]) == (3).to_bytes(8, "little") + (4).to_bytes(8, "little")
    assert [block.checksum for block in frames.with_trailer(frame, frames.trailer([3, 4])).blocks] == [3, 4]


def test_a_message_in_one_piece_and_bytes_elsewhere_have_their_checksums_in_front() -> None:
    frame = Frame(Kind.BLOCK, flags=frames.TRAILING, unit=1, blocks=(Block(7, HASHES),))
    with pytest.raises(CorruptFrame, match="one piece"):
        frames.split(frames.encode(frame) + b"!" + frames.trailer([3]))
    both = frames.TRAILING | frames.ELSEWHERE
    with pytest.raises(CorruptFrame, match="elsewhere"):
        frames.decode(frames.encode(Frame(Kind.BLOCK, flags=both, unit=1, blocks=frame.blocks, offsets=(0,))))


async def test_checksums_follow_once_the_receiver_has_said_that_it_reads_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, encode = list[Frame](), frames.encode
    monkeypatch.setattr(frames, "encode", lambda frame: written.append(frame) or encode(frame))
    first = await pair.rig.transport.connect(pair.rig.address)
    await first.send(pair.opening())
    await first.send(*bare(pair, 0, 1))  # nothing was read yet
    await asyncio.wait_for(first.receive(), 30)
    await first.send(*bare(pair, 2))
    await until(lambda: pair.intake.received_blocks == 3)
    assert [frame.trailing for frame in written if frame.kind is Kind.BLOCK] == [False, True]
    await first.close()


@pytest.mark.parametrize("unit", [1, 4096, 65_536, 65_537, 300_000, 1 << 20])
@pytest.mark.parametrize("count", [1, 5])
async def test_blocks_of_every_size_come_whole(unit: int, count: int) -> None:
    source, got = PageMemory.create(count, unit), list[tuple[Frame, list[bytes], list[int]]]()
    source.view()[:] = random.Random(unit).randbytes(unit * count)

    class Sink:
        def __init__(self, line):
            self.line = line

        def take(self, frame):
            self.line.reply(frames.ack(frame))

        def place(self, frame):
            assert [block.checksum for block in frame.blocks] == [None] * count, "they are known only behind"
            self.places = [memoryview(bytearray(frame.unit)) for _ in frame.blocks]
            return self.places

        def landed(self, frame, checksums, resident=False):
            got.append((frame, [bytes(place) for place in self.places], list(checksums)))
            self.take(frame)

        def over(self, error):
            assert error is None

    server, address = tcp.listen("127.0.0.1", Sink)
    transport = tcp.TcpTransport(1)
    stream = await transport.connect(address)
    await stream.send(Frame(Kind.OPEN))
    pages = [source.page(number) for number in range(count)]
    table = tuple(Block(number, HASHES) for number in range(count))
    for _ in range(3):
        await asyncio.wait_for(stream.receive(), 30)
        await stream.send(Frame(Kind.BLOCK, unit=unit, blocks=table), pages)
    await asyncio.wait_for(stream.receive(), 30)
    for frame, blocks, checksums in got:
        assert blocks == [bytes(page) for page in pages]
        computed = [block_sums.checksum(page) for page in pages]
        assert checksums == [block.checksum for block in frame.blocks] == computed
    assert len(got) == 3
    await transport.close()
    server.close()


# ---- one version back ----------------------------------------------------------------------------------


async def test_a_receiver_of_the_first_version_gets_its_own_frames() -> None:
    there, pair = first_version.Receiver(), Pair()
    pair.rig, pair.epoch = Rig(tcp.TcpTransport(1), there.address, None), 1  # type: ignore[arg-type]
    handoff = pair.handoff()
    running = asyncio.ensure_future(handoff.run())
    for index in range(BLOCKS):  # one by one: what it says is read between them
        handoff.ship(pair.ship(index))
        await until(lambda index=index: len(there.pages) > index)
    handoff.commit(FIRST, 0)
    await asyncio.wait_for(running, 30)
    assert [there.pages[index] for index in range(BLOCKS)] == pair.sent()
    assert not there.refused
    assert there.kinds == [first_version.OPEN, *[first_version.BLOCK] * BLOCKS, first_version.COMMIT]
    await pair.rig.transport.close()
    there.close()


async def test_a_sender_of_the_first_version_is_understood_and_hears_nothing_new(tmp_path: Path) -> None:
    async with admitted("tcp", tmp_path) as pair:
        blocks = [(pair.hashes[index], page) for index, page in enumerate(pair.sent())]
        said = control.Opening("r", LAYOUT, "p0", BLOCKS, 13, "m", FINGERPRINT)
        replies = await asyncio.to_thread(
            first_version.send, pair.rig.address, LEASE, control.encode_opening(said), blocks,
            control.encode_closing(control.Closing(FIRST, 0)),
        )  # fmt: skip
        assert pair.arrived() == pair.sent()
    assert [reply.subject for reply in replies if reply.kind == first_version.ACK] == [1, 2, 3]
    assert [reply.kind for reply in replies if reply.kind != first_version.ACK] == [first_version.END]


async def test_frames_of_the_second_version_are_refused_by_a_receiver_of_the_first() -> None:
    """Such a receiver doesn't know these frames; if a sender is wrong about it, nothing lands."""
    there, pair = first_version.Receiver(), Pair()
    pair.epoch = 1
    stream = await tcp.TcpTransport(1).connect(there.address)
    stream._greeted = 2  # type: ignore[attr-defined]
    await stream.send(pair.opening())
    await stream.send(*bare(pair, 0))
    with contextlib.suppress(Exception):
        while await asyncio.wait_for(stream.receive(), 30) is not None:
            pass
    assert "damaged" in str(there.refused[0])
    assert not there.pages
    await stream.close()
    there.close()


# ---- damage --------------------------------------------------------------------------------------------


class FlippingRelay:
    """Between a sender and a receiver: passes everything on, but for one bit of what the sender says."""

    def __init__(self, address: str) -> None:
        self._to, self.flip_bit, self._links = tcp.split(address), -1, set[asyncio.Task[None]]()

    async def __aenter__(self) -> FlippingRelay:
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for link in self._links:
            link.cancel()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._links.add(asyncio.current_task())  # type: ignore[arg-type]
        there = await asyncio.open_connection(*self._to)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(self._pass(reader, there[1], self.flip_bit), self._pass(there[0], writer, -1))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bit: int) -> None:
        at = 0
        while data := bytearray(await reader.read(1 << 16)):
            if at <= bit // 8 < at + len(data):
                data[bit // 8 - at] ^= 1 << bit % 8
            at += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
async def test_one_flipped_bit_of_header_table_blocks_or_trailer_is_refused(count: int, tmp_path: Path) -> None:
    """A third of them in header and table, a third in the blocks' bytes, a third in the checksums behind them."""
    rng, head = random.Random(4), 64 + 2 * 36  # of a frame of two blocks
    async with admitted("tcp", tmp_path) as pair, FlippingRelay(pair.rig.address) as relay:
        begin = first_version.HELLO.size + 64 + len(pair.opening().body)
        sizes = (head, 2 * LAYOUT.page_bytes, 16)
        for number in range(count):
            part = number % 3
            relay.flip_bit = 8 * (begin + sum(sizes[:part])) + rng.randrange(8 * sizes[part])
            stream = await opened(pair, relay.address)
            first = rng.randrange(BLOCKS - 1)
            await stream.send(*bare(pair, first, first + 1))
            assert (await error_of(stream)).label == "corrupt_frame", relay.flip_bit
            await stream.close()
            await until(lambda: pair.intake.open_streams == 0)
        assert pair.intake.refusals == {"corrupt_frame": count}
        assert not [m for m in pair.told if isinstance(m, BlocksReceived | Commit)], "nothing damaged ever counts"
        relay.flip_bit = -1
        stream = await opened(pair, relay.address)
        await stream.send(*bare(pair, 0, 1))
        await until(lambda: pair.intake.received_blocks == 2)
        await stream.close()


@pytest.mark.parametrize("short_of", [1, 8, 16])
async def test_a_block_counts_only_once_its_checksum_has_come(short_of: int, tmp_path: Path) -> None:
    """All of its bytes lie in the page, and a sender that dies before the last of the trailer leaves nothing."""
    async with admitted("tcp", tmp_path) as pair:
        frame, payload = bare(pair, 0, 1)
        frame = Frame(Kind.BLOCK, LEASE, 1, flags=1 | frames.TRAILING, unit=frame.unit, blocks=frame.blocks)
        trailer = frames.trailer([block_sums.checksum(page) for page in payload])
        _, writer = await asyncio.open_connection(*tcp.split(pair.rig.address))
        writer.write(first_version.HELLO.pack(b"BKVH", 1, 0, 2, bytes(16)) + frames.encode(pair.opening()))
        writer.write(frames.encode(frame) + b"".join(payload) + trailer[: len(trailer) - short_of])
        await until(lambda: bytes(pair.memory.page(pair.lease.pages[1])) == bytes(payload[1]))
        await asyncio.sleep(0.02)
        assert pair.intake.received_blocks == 0
        assert not [m for m in pair.told if isinstance(m, BlocksReceived)]
        writer.write(trailer[len(trailer) - short_of :])
        await until(lambda: pair.intake.received_blocks == 2)
        writer.close()
