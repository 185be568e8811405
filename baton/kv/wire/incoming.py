"""Receives one stream of the socket transports, which comes over one or more connections (lanes).

Knows nothing of listening, of reading a socket, or of what frames mean: a ``Sink`` says where blocks are written.
Once a stream has ended, nothing more is written to its blocks' places, because no other thread writes there.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Protocol

from baton.kv.wire import frames
from baton.kv.wire.base import Accept
from baton.kv.wire.frames import Frame, Kind
from baton.kv.wire.poller import Poller
from baton.kv.wire.unleased import DataPortConnection, UnleasedConnections
from baton.protos.errors import CorruptFrame, HandoffRefused

LINGER_S = 1.0  # seconds for which an ended stream is still read, so that a reset doesn't drop the last replies
MAX_LANES = 32  # connections of one stream


class IncomingLane(DataPortConnection, Protocol):
    """One connection of a stream."""

    sock: socket.socket

    def release(self) -> None:
        """Processes a frame that waits for frames of other lanes, if they have come."""


class StreamServer(Protocol):
    """The parts of a listening server that its streams share."""

    idle_s: float
    poller: Poller
    streams: dict[bytes, IncomingStream]
    unleased: UnleasedConnections


class IncomingStream:
    """Receives one stream, over one or more lanes (connections), for the ``Sink`` that takes its frames."""

    def __init__(self, accept: Accept, server: StreamServer, stream_id: bytes) -> None:
        self.inlets: list[IncomingLane] = []
        self.primary: IncomingLane | None = None
        self.landed = self.taken = 0  # frames with blocks, and without
        self.ended = False
        self.stream_id = stream_id
        self.heard_at = asyncio.get_running_loop().time()
        self._server = server
        self._out = bytearray()
        self.sink = accept(self)

    @property
    def known(self) -> bool:
        """Returns whether the sender has shown a lease (its first frame was accepted) and the stream goes on."""
        return bool(self.taken) and not self.ended

    def join(self, inlet: IncomingLane, lane: int) -> None:
        """Adds a connection as number ``lane``; replies are sent on lane 0. Raises CorruptFrame if there are too
        many.
        """
        if len(self.inlets) >= MAX_LANES:
            raise CorruptFrame(f"a stream has at most {MAX_LANES} lanes", "hello")
        self.inlets.append(inlet)
        if self.known:
            self._server.unleased.remove(inlet)
        if lane == 0:
            self.primary = inlet
            self._flush()

    def has_landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        """Reports to the sink that all blocks of ``frame`` have come; ``resident``: also in the device's pages."""
        self.landed += 1
        self.heard_at = asyncio.get_running_loop().time()
        self.sink.landed(frame, checksums, resident)
        self._release()

    def overtook(self, frame: Frame) -> bool:
        """Returns whether frames that were sent before ``frame`` have yet to come on other lanes."""
        return self.taken < frame.subject if frame.kind in frames.WITH_BLOCKS else self.landed < frame.sequence

    def busy(self) -> bool:
        """Returns whether further frames must wait until blocks of earlier ones were fetched."""
        return False

    def take(self, frame: Frame) -> None:
        """Passes a frame without blocks to the sink; every frame sent before it must have been received."""
        self.taken += 1
        self.sink.take(frame)
        if self.known:
            for inlet in self.inlets:
                self._server.unleased.remove(inlet)
        self._release()

    def _release(self) -> None:
        """Processes frames that waited on other lanes, if they no longer have to."""
        for inlet in tuple(self.inlets):
            inlet.release()

    def fetch(self, frame: Frame) -> int:
        """Copies the blocks of ``frame`` from the sender's memory to their places; returns how many bytes that
        were.

        Raises CorruptFrame if the transport carries blocks on the stream.
        """
        raise CorruptFrame("this transport carries the blocks' bytes on the stream", "flags")

    def reply(self, frame: bytes) -> None:
        """Sends an encoded frame now, or as soon as the socket takes it; drops it if the stream has ended."""
        if not self.ended:
            self._out += frame
            self._flush()

    def end(self) -> None:
        """Ends the stream with an END frame, then reads and drops what is in flight until the sender has closed."""
        if self.ended:
            return
        self.settle()
        self._out += frames.encode(Frame(Kind.END))
        self.ended = True
        self._flush()
        self._release()
        asyncio.get_running_loop().call_later(LINGER_S, self._forget, False)

    def abort(self) -> None:
        """Closes a stream that broke, or that its sender has left, without an END frame."""
        self.settle()
        reset, self.ended = not self.ended, True
        self.sink.over(None)
        self._forget(reset)

    def settle(self) -> None:
        """Waits for copies to the stream's places that other threads or a GPU make; nothing is written after it
        returns.
        """

    def _forget(self, reset: bool) -> None:
        self._server.streams.pop(self.stream_id, None)
        for inlet in tuple(self.inlets):
            inlet.close(reset)

    def over(self) -> None:
        """Releases the stream's resources; called once its last lane is closed."""

    def end_if_idle(self) -> None:
        """Ends the stream if it has shown no lease in time; otherwise checks again later."""
        loop = asyncio.get_running_loop()
        if self.ended or self.known:
            return
        left = self.heard_at + self._server.idle_s - loop.time()
        if left > 0:
            loop.call_later(left, self.end_if_idle)
        else:
            self.sink.over(HandoffRefused(f"no lease was shown for {self._server.idle_s:g} s", "lease"))

    def _flush(self) -> None:
        if self.primary is None or self.primary.sock.fileno() < 0:
            return
        fd = self.primary.sock.fileno()
        try:
            while self._out:
                del self._out[: self.primary.sock.send(self._out)]
        except BlockingIOError:
            self._server.poller.writes(fd, self._flush)
            return
        except OSError:
            self._out.clear()  # the reader finds out
        self._server.poller.writes(fd, None)
