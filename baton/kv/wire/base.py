"""What a transport is: streams of frames to a decode worker, whose blocks land where the receiver says.

Knows nothing of what the frames mean. A transport is one file in this folder; its name in the config is the file's.

A block's bytes land in their page *before* their checksum is known: that saves a copy, or a pass over cold memory.
It is sound because the page is leased and unsealed until the commit: nobody reads it, nobody can find it by its
hash, and the commit is refused while a block has not been verified (``landed``). A block that was verified is never
landed on again (``place`` gives scratch memory instead), and after ``ReplyStream.end`` a transport writes nothing
more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.kv.memory import copying
from baton.kv.wire import frames
from baton.kv.wire.frames import Bytes, Frame
from baton.protos.errors import BatonError, CorruptFrame, WorkerLost


class HandoffStream(Protocol):
    """One stream, the sender's end. Frames arrive whole and in order, or not at all."""

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """Hand over ``frame`` and its blocks' bytes; waits while the receiver is slow. Raises WorkerLost.

        Blocks without a checksum get theirs here, because some transports pass over the bytes anyway.
        The bytes may be read until they are acknowledged or the stream is closed, not after.
        """

    async def receive(self) -> bytes | None:
        """The next frame back; None at the stream's orderly end. Raises WorkerLost when it broke."""

    async def close(self) -> None:
        """End the stream at once, whatever is in flight; again does nothing."""


class Transport(Protocol):
    """Streams to any number of decode workers."""

    async def connect(self, address: str) -> HandoffStream:
        """A new stream to ``address``. Raises WorkerLost, now or at the first send, where nobody answers."""

    async def close(self) -> None:
        """Close every stream and connection."""


class ReplyStream(Protocol):
    """One stream as its receiver sees it. Both methods return at once."""

    def reply(self, frame: bytes) -> None:
        """Send a frame back, in order."""

    def end(self) -> None:
        """No more: once the replies are out the stream ends. From now on no place is written to."""


class Sink(Protocol):
    """What takes the frames of one stream. It never raises for a bad frame: it replies, and ends the line."""

    def take(self, frame: Frame) -> None:
        """A frame without blocks."""

    def place(self, frame: Frame) -> Sequence[memoryview] | None:
        """Where the blocks' bytes of ``frame`` may land, block by block; None when they are refused."""

    def landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        """They did, and these are the checksums of what lies there now; ``resident``: on the device as well."""

    def over(self, error: BatonError | None) -> None:
        """The sender is gone (None), or sent what can't be read (``error``). Again does nothing."""


Accept = Callable[[ReplyStream], Sink]
"""A new stream is here: who takes its frames (``Intake.accept``)."""


def deliver(sink: Sink, data: Bytes) -> None:
    """Hand a message that came in one piece to ``sink``."""
    try:
        frame, payload = frames.split(data)
        if frame.elsewhere:
            raise CorruptFrame("this transport carries the blocks' bytes in the message", "flags")
    except BatonError as error:
        sink.over(error)
        return
    if frame.kind not in frames.WITH_BLOCKS:
        sink.take(frame)
    elif (places := sink.place(frame)) is not None:
        run = memoryview(data)[len(data) - len(payload) * frame.unit :]  # they follow one another
        sink.landed(frame, copying.scatter(places, run))


def sealed(frame: Frame, payload: Sequence[memoryview]) -> Frame:
    """``frame`` with the checksums of its blocks' bytes, unless its maker gave them."""
    return frame if frame.sealed else frame.seal(copying.checksums(payload))


def message(frame: Frame, payload: Sequence[memoryview]) -> bytes:
    """Header, body and blocks' bytes in one piece; a checksum that is missing is computed while they are copied."""
    if frame.sealed:
        return frames.message(frame, payload)
    return copying.gather(payload, lambda checksums: frames.encode(frame.seal(checksums)))


def resident_bytes(stream: HandoffStream) -> int:
    """Of a frame of blocks on its card, as ``stream`` takes it best; 0: it sends from the host's pages."""
    return int(getattr(stream, "resident_bytes", 0))


class QueuedReplyStream:
    """A Line whose replies a coroutine takes out: ``get`` gives None once the line has ended and is empty."""

    def __init__(self) -> None:
        self.ended = False
        self._replies: asyncio.Queue[bytes | None] = asyncio.Queue()

    def reply(self, frame: bytes) -> None:
        """Queue it."""
        if not self.ended:
            self._replies.put_nowait(frame)

    def end(self) -> None:
        """Queue the end."""
        if not self.ended:
            self.ended = True
            self._replies.put_nowait(None)

    async def get(self) -> bytes | None:
        """The next reply."""
        return await self._replies.get()


class WatchedStream:
    """A stream whose break is told."""

    def __init__(self, stream: HandoffStream, broke: Callable[[], None]) -> None:
        self._stream = stream
        self._broke = broke
        self._closed = False

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """As the stream does."""
        try:
            await self._stream.send(frame, payload)
        except WorkerLost:
            self._lost()
            raise

    async def receive(self) -> bytes | None:
        """As the stream does."""
        try:
            return await self._stream.receive()
        except WorkerLost:
            self._lost()
            raise

    async def close(self) -> None:
        """As the stream does."""
        self._closed = True
        await self._stream.close()

    @property
    def resident_bytes(self) -> int:
        """As the stream does."""
        return resident_bytes(self._stream)

    def _lost(self) -> None:
        if not self._closed:  # else it was we who broke it
            self._broke()
