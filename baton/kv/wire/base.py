"""Defines what a transport is: streams of frames to a decode worker, whose blocks land where the receiver says.

Knows nothing of what the frames mean. A transport is one file in ``kv/transport``; its name in the configuration is
the file's name.

A block's bytes land in their page *before* their checksum is known, which saves a copy, or a pass over cold memory.
That is sound because the page is leased and unsealed until the commit: nobody reads it, nobody can find it by its
hash, and the commit is refused while a block has not been verified (``Sink.landed``). A block that was verified is
never landed on again (``Sink.place`` gives scratch memory instead), and after ``ReplyStream.end`` a transport
writes nothing more.
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
    """Carries frames from one sender to one receiver, seen from the sender. Frames arrive whole and in order, or
    not at all.
    """

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """Sends ``frame`` and the bytes of its blocks, and waits while the receiver is slow. Raises WorkerLost.

        Blocks without a checksum get theirs here, because some transports pass over the bytes anyway. ``payload``
        has one view per block; it may be read until the blocks are acknowledged or the stream is closed, not after.
        """

    async def receive(self) -> bytes | None:
        """Returns the next frame from the receiver, or None at the stream's orderly end. Raises WorkerLost when it
        broke.
        """

    async def close(self) -> None:
        """Ends the stream at once, whatever is in flight. A second call does nothing."""


class Transport(Protocol):
    """Opens streams to any number of decode workers."""

    async def connect(self, address: str) -> HandoffStream:
        """Returns a new stream to ``address``. Raises WorkerLost, now or at the first send, where nobody
        answers.
        """

    async def close(self) -> None:
        """Closes every stream and connection."""


class ReplyStream(Protocol):
    """Carries frames from the receiver of a handoff stream back to its sender. Both methods return at once."""

    def reply(self, frame: bytes) -> None:
        """Sends an encoded frame back, in order."""

    def end(self) -> None:
        """Ends the stream once the replies are out. From this call on the transport writes to no place of the
        stream.
        """


class Sink(Protocol):
    """Takes the frames of one stream. It raises nothing for a bad frame: it replies with an error and ends
    the stream.
    """

    def take(self, frame: Frame) -> None:
        """Takes a frame without blocks."""

    def place(self, frame: Frame) -> Sequence[memoryview] | None:
        """Returns where the bytes of each block of ``frame`` may land, or None when the blocks are refused."""

    def landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        """Reports that the blocks of ``frame`` lie in their places, with the checksums of what lies there now.

        ``resident`` says that the device's pages hold the blocks as well.
        """

    def over(self, error: BatonError | None) -> None:
        """Reports that the sender is gone (None) or sent what can't be read (``error``). A second call does
        nothing.
        """


Accept = Callable[[ReplyStream], Sink]
"""Returns the ``Sink`` that takes the frames of a new stream (``Intake.accept``)."""


def deliver(sink: Sink, data: Bytes) -> None:
    """Hands a message that came in one piece to ``sink``, after copying its blocks to the places that the
    sink gives.
    """
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
    """Returns ``frame`` with the checksums of its blocks' bytes, unless its maker gave them already."""
    return frame if frame.sealed else frame.seal(copying.checksums(payload))


def message(frame: Frame, payload: Sequence[memoryview]) -> bytes:
    """Returns header, body and the blocks' bytes in one piece. Missing checksums are computed while the bytes are
    copied.
    """
    if frame.sealed:
        return frames.message(frame, payload)
    return copying.gather(payload, lambda checksums: frames.encode(frame.seal(checksums)))


def resident_bytes(stream: HandoffStream) -> int:
    """Returns the bytes per frame of blocks that ``stream`` best takes from its card; 0 if it sends from the host's
    pages.
    """
    return int(getattr(stream, "resident_bytes", 0))


class QueuedReplyStream:
    """Implements ``ReplyStream`` by a queue that a coroutine reads."""

    def __init__(self) -> None:
        self.ended = False
        self._replies: asyncio.Queue[bytes | None] = asyncio.Queue()

    def reply(self, frame: bytes) -> None:
        """Queues an encoded frame, unless the stream has ended."""
        if not self.ended:
            self._replies.put_nowait(frame)

    def end(self) -> None:
        """Queues the end. A second call does nothing."""
        if not self.ended:
            self.ended = True
            self._replies.put_nowait(None)

    async def get(self) -> bytes | None:
        """Returns the next reply, or None once the stream has ended and every reply was read."""
        return await self._replies.get()


class WatchedStream:
    """Wraps a stream and calls ``broke`` when it breaks, but not when it was closed here."""

    def __init__(self, stream: HandoffStream, broke: Callable[[], None]) -> None:
        self._stream = stream
        self._broke = broke
        self._closed = False

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """Sends as the wrapped stream does, and reports WorkerLost to ``broke`` before it raises it."""
        try:
            await self._stream.send(frame, payload)
        except WorkerLost:
            self._lost()
            raise

    async def receive(self) -> bytes | None:
        """Receives as the wrapped stream does, and reports WorkerLost to ``broke`` before it raises it."""
        try:
            return await self._stream.receive()
        except WorkerLost:
            self._lost()
            raise

    async def close(self) -> None:
        """Closes the wrapped stream; ``broke`` is not called."""
        self._closed = True
        await self._stream.close()

    @property
    def resident_bytes(self) -> int:
        """Returns what ``resident_bytes`` says of the wrapped stream."""
        return resident_bytes(self._stream)

    def _lost(self) -> None:
        if not self._closed:  # else it was we who broke it
            self._broke()
