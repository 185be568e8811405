"""A decode worker's intake with its pages, an engine that answers on command and a sender of frames."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
import pytest

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.layout import prefix
from baton.kv.layout.page import layout_for
from baton.kv.memory import block_sums
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PageLease, PagePool
from baton.kv.wire import control, frames
from baton.kv.wire.base import QueuedReplyStream, deliver
from baton.kv.wire.frames import Block, Frame, Kind
from baton.protos.channel import Commit, ReceiveClosed, ReceiveOpened
from baton.protos.errors import BatonError
from baton.protos.nouns import TokenRun

LAYOUT = layout_for("float32", 1, 1, 4)
FINGERPRINT = "f" * 64
FIRST = TokenRun(0, (42,))


class Lease:
    """Holds one admitted request: its pages from a real pool, and the frames that a correct sender would send."""

    def __init__(self, rig: Rig, key: int, tokens: int, held: int = 0) -> None:
        self.rig, self.key, self.epoch = rig, key, 1
        self.id = random.Random(key).randbytes(16)
        self.hashes = prefix.chain(prefix.root(FINGERPRINT, "float32"), [key] * tokens)
        cached = self.hashes[:held]
        with rig.pool.open(cached, held) as earlier:
            for index, block in enumerate(cached):
                earlier.seal(index, block)
        self.pages: PageLease = rig.pool.open(cached, len(self.hashes))
        assert self.pages.held == held
        rig.intake.register(IntakeLease(key, self.id, 1, self.pages.pages, self.hashes, held))

    def payload(self, index: int) -> bytes:
        return random.Random(f"{self.key}.{index}").randbytes(LAYOUT.page_bytes)

    def frame(self, kind: Kind, **fields: Any) -> bytes:
        return frames.encode(Frame(**{"kind": kind, "lease": self.id, "epoch": self.epoch} | fields))

    def open(self, **changes: Any) -> bytes:
        said = {"total_blocks": len(self.hashes), "layout": LAYOUT, "fingerprint": FINGERPRINT} | changes
        opening = control.Opening(request_id="r", sender="p0", tail_tokens=1, model_id="m", **said)
        return self.frame(Kind.OPEN, body=control.encode_opening(opening))

    def block(self, index: int, **changes: Any) -> bytes:
        said = {"hash": dict(enumerate(self.hashes)).get(index, bytes(32)), "payload": self.payload(index)}
        return self.blocks([(index, said | changes)], **changes)

    def blocks(self, wanted: list[tuple[int, dict[str, Any]]], **changes: Any) -> bytes:
        """One frame with several blocks: their index, and what differs from a right sender's."""
        table, payload = [], []
        for index, said in wanted:
            said = {"hash": self.hashes[index], "payload": self.payload(index)} | said if len(wanted) > 1 else said
            table.append(Block(index, said["hash"], block_sums.checksum(said["payload"])))
            payload.append(said["payload"])
        fields = {"kind": Kind.BLOCK, "lease": self.id, "epoch": self.epoch, "flags": 1, "unit": len(payload[0])}
        changes = {name: value for name, value in changes.items() if name not in ("hash", "payload")}
        return frames.message(Frame(**fields | {"blocks": tuple(table)} | changes), payload)

    def commit(self, **changes: Any) -> bytes:
        body = control.encode_closing(control.Closing(FIRST, 16))
        return self.frame(Kind.COMMIT, **{"body": body} | changes)

    def everything(self) -> list[bytes]:
        return [self.open(), *(self.block(i) for i in range(self.pages.held, len(self.hashes))), self.commit()]


class Rig:
    """A real pool and real pages; the engine's part of the protocol by the book."""

    def __init__(self, pages: int = 32) -> None:
        self.pool = PagePool(pages)
        self.memory = PageMemory.create(pages, LAYOUT.page_bytes)
        self.told: list[msgspec.Struct] = []
        self.intake = Intake(self.memory, LAYOUT, FINGERPRINT, self.tell)
        self.leases: dict[int, Lease] = {}
        self.commits = True

    def admit(self, key: int, tokens: int, held: int = 0) -> Lease:
        self.leases[key] = lease = Lease(self, key, tokens, held)
        return lease

    def tell(self, message: Any) -> None:
        self.told.append(message)
        lease = self.leases[message.key]
        if isinstance(message, ReceiveOpened):
            lease.pages.hold()
        elif isinstance(message, ReceiveClosed):
            lease.pages.release()
        elif isinstance(message, Commit) and self.commits:
            self.intake.on_committed(message.key, message.epoch)

    def heard(self, kind: type) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]

    async def exchange(self, *sent: bytes) -> list[Frame]:
        """Every reply to a stream that sends these frames and ends."""
        return [frames.decode(reply) async for reply in serve(self.intake, _frames(*sent))]

    async def refusal(self, *sent: bytes) -> BatonError:
        """The typed error that these frames end in."""
        return refused(await self.exchange(*sent))

    def written(self) -> dict[int, bytes]:
        """Pages that are not zero."""
        pages = ((page, bytes(self.memory.page(page))) for page in range(self.pool.pages))
        return {page: data for page, data in pages if any(data)}

    def end(self) -> None:
        """Closes everything, and asserts that nothing is left leased or in quarantine."""
        for key, lease in self.leases.items():
            self.intake.close(key)
            lease.pages.close()
        self.pool.check()
        counts = self.pool.snapshot_counts()
        assert (counts.leased, counts.quarantined, counts.leases) == (0, 0, 0), "pages leaked"
        assert self.intake.open_streams == 0


async def serve(intake: Intake, incoming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """A transport that delivers message by message: what the intake replies, until one side ends the stream."""
    line = QueuedReplyStream()
    sink = intake.accept(line)
    reading = asyncio.ensure_future(_deliver(sink, line, incoming))
    try:
        while (reply := await line.get()) is not None:
            yield reply
    finally:
        reading.cancel()
        sink.over(None)


async def _deliver(sink: Any, line: QueuedReplyStream, incoming: AsyncIterator[bytes]) -> None:
    async for data in incoming:
        if line.ended:
            return
        deliver(sink, data)
    sink.over(None)


async def _frames(*sent: bytes) -> AsyncIterator[bytes]:
    for frame in sent:
        yield frame


def refused(replies: list[Frame]) -> BatonError:
    assert replies[-1].kind is Kind.ERROR, f"not refused: {replies[-1]}"
    assert Kind.ERROR not in [reply.kind for reply in replies[:-1]]
    return control.decode_error(replies[-1].body)


class Live:
    """A stream that stays open between frames."""

    def __init__(self, rig: Rig) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.replies: AsyncGenerator[bytes, None] = serve(rig.intake, self._incoming())

    async def _incoming(self) -> AsyncIterator[bytes]:
        while (frame := await self.queue.get()) is not None:
            yield frame

    def send(self, frame: bytes | None) -> None:
        self.queue.put_nowait(frame)

    async def reply(self) -> Frame:
        return frames.decode(await asyncio.wait_for(anext(self.replies), 30))

    async def ask(self, frame: bytes) -> Frame:
        self.send(frame)
        return await self.reply()


@pytest.fixture
def rig() -> Any:
    made = Rig()
    yield made
    made.end()
