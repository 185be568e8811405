"""Defines the interface of a transport: streams of frames to a decode worker, which says where blocks are written.

Knows nothing of frames' meaning. A transport is one module in ``kv/transport``; its name in the configuration is
the module's.

A block's bytes are written to their page *before* their checksum is known, which saves a copy, or a pass over cold
memory. That is safe because the page is leased and unsealed until the commit: nobody reads it, nobody can find it
by its hash, and the commit is refused while a block has not been verified (``Sink.landed``). A verified block is
never overwritten (``Sink.place`` gives scratch memory instead), and after ``ReplyStream.end`` a transport writes
nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.kv.memory import copying
from baton.kv.memory.block_sums import Bytes
from baton.kv.wire import frames
from baton.kv.wire.frames import Frame
from baton.protos.errors import BatonError, CorruptFrame, WorkerLost


class HandoffStream(Protocol):
    """Sends frames from one sender to one receiver, whole and in order, and receives replies."""

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """Sends ``frame`` and its blocks' bytes, and waits while the receiver is slow. Raises WorkerLost.

        Blocks without a checksum get theirs from the stream. ``payload`` has one view per block, which may be read
        until the blocks are acknowledged or the stream is closed.
        """

    async def receive(self) -> bytes | None:
        """Returns the next encoded frame from the receiver, or None at the stream's orderly end. Raises WorkerLost
        if the stream broke.
        """

    async def close(self) -> None:
        """Ends the stream at once, whatever is in flight. A second call does nothing."""


class Transport(Protocol):
    """Opens handoff streams to any number of decode workers."""

    async def connect(self, address: str) -> HandoffStream:
        """Returns a new stream to the worker at ``address``. If nobody answers, raises WorkerLost, now or at the
        first send.
        """

    async def close(self) -> None:
        """Closes every stream and connection."""


class ReplyStream(Protocol):
    """Sends frames from the receiver of a handoff stream back to its sender. Both methods return at once."""

    def reply(self, frame: bytes) -> None:
        """Queues an encoded frame, to be sent after earlier ones."""

    def end(self) -> None:
        """Ends the stream once the replies are sent. From this call on the transport writes no more blocks."""


class Sink(Protocol):
    """Takes the frames that a receiver gets on one stream. Instead of raising an error for a bad frame, it replies
    with one and ends the stream.
    """

    def take(self, frame: Frame) -> None:
        """Processes a frame without blocks."""

    def place(self, frame: Frame) -> Sequence[memoryview] | None:
        """Returns the memory to which the bytes of each block of ``frame`` may be written, or None if the blocks
        are refused.

        On a stream of several lanes frames land side by side: ``place`` may be called for another frame before
        ``landed`` is called with this one, which is the same object.
        """

    def landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        """Reports that the blocks of ``frame`` were written to their places, with the checksums of the bytes there.

        ``resident`` says that the device's pages contain the blocks as well.
        """

    def over(self, error: BatonError | None) -> None:
        """Reports that the sender is gone (None) or sent invalid data (``error``). A second call does nothing."""


Accept = Callable[[ReplyStream], Sink]
"""Returns the ``Sink`` that takes the frames of a new stream (``Intake.accept``)."""


def deliver(sink: Sink, data: Bytes) -> None:
    """Passes a message, which contains its blocks' bytes, to ``sink``, after copying the blocks to the places that
    the sink gives.

    A message that can't be decoded is reported by ``sink.over``.
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
    """Returns ``frame`` with the checksums of its blocks, computed from ``payload`` unless it has them already."""
    return frame if frame.sealed else frame.seal(copying.checksums(payload))


def message(frame: Frame, payload: Sequence[memoryview]) -> bytes:
    """Returns header, body and the blocks' bytes in one piece. Missing checksums are computed while the bytes are
    copied.
    """
    if frame.sealed:
        return frames.message(frame, payload)
    return copying.gather(payload, lambda checksums: frames.encode(frame.seal(checksums)))


def resident_bytes(stream: HandoffStream) -> int:
    """Returns the bytes per frame of blocks that ``stream`` best takes from its GPU's pages; 0 if it sends from the
    host's pages.
    """
    return int(getattr(stream, "resident_bytes", 0))


class QueuedReplyStream:
    """Implements ``ReplyStream`` by a queue that a coroutine reads with ``get``."""

    def __init__(self) -> None:
        self.ended = False
        self._replies: asyncio.Queue[bytes | None] = asyncio.Queue()

    def reply(self, frame: bytes) -> None:
        """Queues an encoded frame, unless the stream has ended."""
        if not self.ended:
            self._replies.put_nowait(frame)

    def end(self) -> None:
        """Ends the stream after the replies queued so far. A second call does nothing."""
        if not self.ended:
            self.ended = True
            self._replies.put_nowait(None)

    async def get(self) -> bytes | None:
        """Returns the next reply, or None once the stream has ended and every reply was read."""
        return await self._replies.get()


class WatchedStream:
    """Wraps a stream and calls ``broke`` when that raises WorkerLost, unless it was closed by its user."""

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
        """Returns the bytes per frame that the wrapped stream best takes from its GPU; 0 if it sends from host
        pages.
        """
        return resident_bytes(self._stream)

    def _lost(self) -> None:
        if not self._closed:  # else it was we who broke it
            self._broke()
