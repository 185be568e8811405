"""Many handoffs at once over each transport, cancelled, rearmed and damaged at random: no page wrong, none lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.layout import prefix
from baton.kv.layout.page import layout_for
from baton.kv.memory import block_sums
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PageLease, PagePool
from baton.kv.transport import shm, tcp
from baton.kv.transport.grpc import SERVER_OPTIONS, GrpcTransport, handoff_handler
from baton.kv.wire.base import ReplyStream, Sink, Transport
from baton.kv.wire.frames import Frame
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.protos.channel import Commit, ReceiveClosed, ReceiveOpened, ShipBlock
from baton.protos.errors import BatonError, PoolExhausted
from baton.protos.nouns import TokenRun

LAYOUT = layout_for("float32", 2, 2, 16)
FINGERPRINT = "f" * 64
PAGES = 48


class Decode:
    """Plays a decode worker with a small pool, so that pages are reused all the time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pool = PagePool(PAGES)
        self.memory = PageMemory.create(PAGES, LAYOUT.page_bytes)
        self.intake = Intake(self.memory, LAYOUT, FINGERPRINT, self.tell)
        self.leases: dict[int, PageLease] = {}
        self.answers: dict[int, list[bytes]] = {}
        self.hashes: dict[int, list[bytes]] = {}
        self.commits = 0

    def tell(self, message: Any) -> None:
        lease = self.leases[message.key]
        if isinstance(message, ReceiveOpened):
            lease.hold()
        elif isinstance(message, ReceiveClosed):
            lease.release()
        elif isinstance(message, Commit):
            self.verify(message.key)
            self.intake.on_committed(message.key, message.epoch)

    def verify(self, key: int) -> None:
        """Asserts that decoding request ``key`` now would read the right pages, and seals them."""
        pages = [bytes(self.memory.page(page)) for page in self.leases[key].pages]
        assert pages == self.answers[key], f"request {key} would decode from wrong pages"
        for index, block in enumerate(self.hashes[key][:-1]):
            self.leases[key].seal(index, block)
        self.commits += 1

    def accept(self, line: ReplyStream) -> Sink:
        return Damaging(self.intake.accept(line), self.rng)


class Damaging:
    """A Sink behind a bad wire: blocks land with a bit flipped now and then."""

    def __init__(self, sink: Sink, rng: random.Random) -> None:
        self.sink, self.rng = sink, rng
        self.take, self.over = sink.take, sink.over

    def place(self, frame: Frame) -> Sequence[memoryview] | None:
        self.places = self.sink.place(frame)
        return self.places

    def landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        if self.rng.random() < 0.05 and self.places:
            place = self.rng.choice(self.places)
            place[self.rng.randrange(len(place))] ^= 1 << self.rng.randrange(8)
        self.sink.landed(frame, [block_sums.checksum(place) for place in self.places or ()])


class Storm:
    """Requests that begin, fail and go away as chance has it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.decode = Decode(self.rng)
        self.transport: Transport = GrpcTransport()
        self.source = PageMemory.create(256, LAYOUT.page_bytes)
        self.source.view()[:] = self.rng.randbytes(256 * LAYOUT.page_bytes)
        self.ends: Counter[str] = Counter()
        self.address = ""

    async def request(self, key: int) -> None:
        tokens = [key % 12] * self.rng.randint(1, 120)
        hashes = prefix.chain(prefix.root(FINGERPRINT, "float32"), tokens)
        source = [block[0] for block in hashes]  # the same block has the same bytes, whoever computes it
        lease_id = self.rng.randbytes(16)
        try:
            lease = self.decode.pool.open(hashes, len(hashes), limit_held=len(hashes) - 1)
        except PoolExhausted:
            self.ends["no room"] += 1
            return
        self.decode.leases[key], self.decode.hashes[key] = lease, hashes
        self.decode.answers[key] = [bytes(self.source.page(page)) for page in source]
        self.decode.intake.register(IntakeLease(key, lease_id, 1, lease.pages, hashes, lease.held))
        for epoch in (1, 2, 3):
            blocks = [ShipBlock(i, source[i], hashes[i], 16) for i in range(lease.held, len(hashes))]
            destination = Destination(self.address, lease_id, epoch, "r", len(hashes), 1)
            if await self.attempt(destination, blocks):
                break
            self.decode.intake.rearm(key, epoch + 1)
        await asyncio.sleep(self.rng.random() * 0.002)
        self.decode.intake.close(key)
        self.ends["shared"] += lease.held
        lease.close()

    async def attempt(self, destination: Destination, blocks: list[ShipBlock]) -> bool:
        sender = Sender("p", "m", FINGERPRINT, LAYOUT)
        window = self.rng.choice((0, 4, 64)) * LAYOUT.page_bytes
        handoff = Handoff(self.transport, self.source, sender, destination, lambda: 0.0, window)
        running = asyncio.ensure_future(handoff.run())
        if self.rng.random() < 0.2:
            asyncio.get_running_loop().call_later(self.rng.random() * 0.02, running.cancel)
        cut = self.rng.randint(0, len(blocks))
        handoff.ship(blocks[:cut])
        await asyncio.sleep(self.rng.random() * 0.004)
        handoff.ship(blocks[cut:])
        handoff.commit(TokenRun(0, (1,)), 0)
        await asyncio.wait({running})
        error = None if running.cancelled() else running.exception()
        assert error is None or isinstance(error, BatonError), error
        self.ends["cancelled" if running.cancelled() else "ok" if error is None else error.label] += 1
        return error is None and not running.cancelled()


async def over_grpc(storm: Storm, folder: Path) -> Callable[[], Any]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handoff_handler(storm.decode.accept),))
    storm.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    return lambda: server.stop(0)


async def over_tcp(storm: Storm, folder: Path) -> Callable[[], Any]:
    server, storm.address = tcp.listen("127.0.0.1", storm.decode.accept)
    storm.transport = tcp.TcpTransport(lanes=2)

    async def stop() -> None:
        server.close()

    return stop


async def over_shm(storm: Storm, folder: Path) -> Callable[[], Any]:
    server, storm.address = shm.listen(str(folder / "kv"), storm.decode.accept)
    storm.transport = shm.ShmTransport(storm.source)

    async def stop() -> None:
        server.close()

    return stop


@pytest.fixture(params=[over_grpc, over_tcp, over_shm])
async def storm(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storm]:
    made = Storm(20)
    stop = await request.param(made, tmp_path)
    yield made
    await made.transport.close()
    await stop()


async def test_a_storm_of_handoffs_leaves_no_wrong_page_and_no_page_behind(storm: Storm) -> None:
    for batch in range(20):
        await asyncio.gather(*(storm.request(batch * 16 + number) for number in range(16)))
        storm.decode.pool.check()
    pool = storm.decode.pool
    async with asyncio.timeout(30):
        while pool.snapshot_counts().quarantined:
            await asyncio.sleep(0.001)
    counts = pool.snapshot_counts()
    assert (counts.leased, counts.quarantined, counts.leases) == (0, 0, 0)
    assert storm.decode.commits >= storm.ends["ok"] > 100
    assert storm.ends["cancelled"] > 0, "a fast transport leaves a cancel little time to meet a handoff, but some"
    assert storm.ends["corrupt_frame"] > 0, "a client that leaves first hides one"
    assert storm.ends["shared"] > 50
    assert storm.decode.intake.open_streams == 0
