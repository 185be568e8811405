"""A prompt's blocks, and a receiver that answers by a script."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from baton.kv.layout import prefix
from baton.kv.layout.page import layout_for
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport.loopback import LoopbackTransport
from baton.kv.wire import control, frames
from baton.kv.wire.base import ReplyStream, Transport
from baton.kv.wire.frames import Frame, Kind
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.protos.channel import ShipBlock
from baton.protos.errors import BatonError, StaleEpoch
from baton.protos.nouns import TokenRun

LAYOUT = layout_for("float32", 2, 2, 8)
FINGERPRINT = "f" * 64
FIRST = TokenRun(0, (42,), finish_reason="length")
LEASE = b"L" * 16
BLOCKS = 6


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Source:
    """A prefill worker's pages and the blocks of one prompt, page order unlike block order."""

    def __init__(self) -> None:
        self.memory = PageMemory.create(BLOCKS, LAYOUT.page_bytes)
        self.memory.view()[:] = os.urandom(BLOCKS * LAYOUT.page_bytes)
        self.hashes = prefix.chain(prefix.root(FINGERPRINT, "float32"), range(16 * BLOCKS - 3))
        self.blocks = [
            ShipBlock(i, BLOCKS - 1 - i, self.hashes[i], 16 if i < BLOCKS - 1 else 13) for i in range(BLOCKS)
        ]

    def handoff(
        self, transport: Transport, address: str = "d0", clock: Callable[[], float] | None = None, **settings: Any
    ) -> Handoff:
        sender = Sender("p0", "m", FINGERPRINT, LAYOUT)
        destination = Destination(address, LEASE, 1, "r", BLOCKS, 13)
        return Handoff(transport, self.memory, sender, destination, clock or Clock(), **settings)


class Receiver:
    """Takes frames and answers as told; never looks at an epoch or a lease."""

    def __init__(self) -> None:
        self.got: list[Frame] = []
        self.pages: dict[int, bytes] = {}
        self.unanswered: list[int] = []
        self.open = asyncio.Event()
        self.open.set()
        self.closed = asyncio.Event()
        self.refuse_at: int | None = None
        self.error: BatonError = StaleEpoch("epoch 2 is in force", "epoch")

    def accept(self, line: ReplyStream) -> Scripted:
        return Scripted(self, line)

    async def answer(self, frame: Frame, line: ReplyStream) -> None:
        await self.open.wait()
        blocks, self.unanswered = self.unanswered, []
        line.reply(frames.ack(frame, blocks if frame.kind is Kind.BLOCK else ()))

    def kinds(self) -> list[Kind]:
        return [frame.kind for frame in self.got]


class Scripted:
    """One stream to a Receiver."""

    def __init__(self, receiver: Receiver, line: ReplyStream) -> None:
        self.receiver, self.line = receiver, line
        self.answering: set[asyncio.Task[None]] = set()

    def take(self, frame: Frame) -> None:
        there = self.receiver
        there.got.append(frame)
        if there.refuse_at == len(there.got):
            self.line.reply(frames.encode(Frame(Kind.ERROR, body=control.encode_error(there.error))))
            self.line.end()
        elif frame.kind is Kind.OPEN:
            self.line.reply(frames.ack(frame))
        elif frame.kind is Kind.COMMIT or frame.wants_ack:
            self.answering.add(asyncio.ensure_future(there.answer(frame, self.line)))

    def place(self, frame: Frame) -> list[memoryview]:
        self.places = [memoryview(bytearray(frame.unit)) for _ in frame.blocks]
        return self.places

    def landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        assert list(checksums) == [block.checksum for block in frame.blocks]
        for block, place in zip(frame.blocks, self.places, strict=True):
            self.receiver.pages[block.index] = bytes(place)
            self.receiver.unanswered.append(block.index)
        self.take(frame)

    def over(self, error: BatonError | None) -> None:
        self.receiver.closed.set()
        self.line.end()
        for answer in self.answering:
            answer.cancel()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
async def transport(receiver: Receiver) -> AsyncIterator[Transport]:
    made = LoopbackTransport({"d0": receiver.accept})
    yield made
    await made.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
