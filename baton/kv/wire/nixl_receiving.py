"""Receives streams by the nixl transport: reads blocks from senders' memory into staging, copies them to pages.

Knows nothing of what frames mean. A stream reads into two staging buffers in turn. Blocks are copied to pages,
and hashed, on the event loop: an ended stream writes nothing more, whatever NIXL still does, and no read uses a
page.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from itertools import islice

import msgspec

from baton.kv.memory import copying
from baton.kv.wire.base import Accept
from baton.kv.wire.frames import Frame
from baton.kv.wire.incoming import IncomingStream
from baton.kv.wire.inlet import Inlet
from baton.kv.wire.keepalive import notice_dead_peers
from baton.kv.wire.one_sided import MOST_METADATA, NixlReader, Remote, Staging
from baton.kv.wire.receiving import SocketServer
from baton.kv.wire.sending import HELLO
from baton.protos.errors import BatonError, ConfigError, CorruptFrame

log = logging.getLogger("baton.kv")

SHOWN = struct.Struct(f"<QQH{MOST_METADATA}s")  # address and bytes of the sender's pages, its agent's metadata
AT_ONCE = 2  # reads of a stream that are in progress or not yet copied
STAGING_BYTES = 4 << 20  # least bytes of a staging buffer, so that one can be reused for frames of other sizes
MOST_WAITING = 4096  # frames of a stream that wait for their blocks to be read; then no more are received
MOST_BYTES = 256 << 20  # bytes of a frame's blocks; a stranger might announce any number


class PendingRead(msgspec.Struct):
    """A frame whose blocks are to be read, the buffer for them, and the read once it has begun."""

    frame: Frame
    into: Staging | None = None
    done: asyncio.Future[None] | None = None


class NixlServer(SocketServer):
    """Receives streams by the nixl transport; one reader serves all of them."""

    hello_bytes = HELLO.size + SHOWN.size

    def __init__(self, sock: socket.socket, accept: Accept) -> None:
        super().__init__(sock, accept, _ready)
        self.reader = NixlReader()
        self._remote = Remote(b"", 0, 0)

    def close(self) -> None:
        """Stops listening, breaks every stream and ends the reader."""
        super().close()
        self.reader.close()

    def enter(self, inlet: Inlet, said: bytes, fds: list[int]) -> IncomingStream:
        """Returns the stream of a connection whose hello ``said`` describes the sender's memory. Raises
        CorruptFrame.
        """
        at, size, length, metadata = SHOWN.unpack(said[HELLO.size :])
        if length > MOST_METADATA:
            raise CorruptFrame(f"{length} bytes of metadata, {MOST_METADATA} at most", "hello")
        self._remote = Remote(metadata[:length], at, size)
        return super().enter(inlet, said[: HELLO.size], fds)

    def incoming(self, stream_id: bytes, anchor: bool, fds: list[int]) -> IncomingStream:
        """Returns a new stream that reads from the memory that its hello described."""
        return NixlIncomingStream(self._accept, self, stream_id, self.reader, self._remote)


class NixlIncomingStream(IncomingStream):
    """Receives a stream whose blocks are read from the sender's memory. Frames are reported in the order in which
    they came.
    """

    def __init__(
        self, accept: Accept, server: SocketServer, stream_id: bytes, reader: NixlReader, remote: Remote
    ) -> None:
        super().__init__(accept, server, stream_id)
        self._reader, self._remote = reader, remote
        self._coming: deque[PendingRead] = deque()

    def fetch(self, frame: Frame) -> int:
        """Starts reading the blocks of ``frame``, which are copied to their places and hashed later; returns their
        bytes, at least 1. Raises CorruptFrame.
        """
        if frame.offsets and max(frame.offsets) + frame.unit > self._remote.size:
            raise CorruptFrame("a block lies beyond the sender's memory", "offsets")
        if frame.unit * len(frame.offsets) > MOST_BYTES:
            raise CorruptFrame(f"a frame of more than {MOST_BYTES} bytes", "unit")
        self._coming.append(PendingRead(frame))
        self._go_on()
        return max(1, frame.unit * len(frame.offsets))

    def busy(self) -> bool:
        """Returns whether further frames must wait, because MOST_WAITING are still to be read."""
        return len(self._coming) >= MOST_WAITING

    def over(self) -> None:
        """Abandons reads in progress; they write only to staging memory, which is reused once they have ended."""
        while self._coming:
            self._leave(self._coming.popleft())

    def _go_on(self) -> None:
        """Reports frames whose blocks have come, in order, and starts the next reads."""
        try:
            while self._coming and not self.ended and self._is_in(self._coming[0]):
                self._land(self._coming.popleft())
            for pending in [*islice(self._coming, AT_ONCE)] if not self.ended else ():
                self._start(pending)
        except ConfigError as error:
            log.error("a handoff by nixl broke: %s", error.message)
            self.abort()
        except BatonError as error:
            self.sink.over(error)
        except Exception:  # a bug of ours ends this stream, not the process
            log.exception("a handoff by nixl failed")
            self.abort()

    def _is_in(self, pending: PendingRead) -> bool:
        if not pending.frame.offsets:
            return True
        if pending.done is None or not pending.done.done():
            return False
        pending.done.result()
        return True

    def _land(self, pending: PendingRead) -> None:
        frame, into = pending.frame, pending.into
        try:
            places = self.sink.place(frame)
            if places is not None:
                sources = [] if into is None else [into.at + number * frame.unit for number in range(len(places))]
                self.has_landed(frame, copying.copy_from(places, sources))
        finally:
            if into is not None:
                self._reader.give_back(into)

    def _start(self, pending: PendingRead) -> None:
        if pending.done is not None or not pending.frame.offsets:
            return
        unit = pending.frame.unit
        pending.into = self._reader.staging(max(STAGING_BYTES, unit * len(pending.frame.offsets)))
        pending.done = self._reader.read(self._remote, pending.frame.offsets, unit, pending.into)
        pending.done.add_done_callback(lambda _: self._go_on())

    def _leave(self, pending: PendingRead) -> None:
        """Gives the read's staging back once the read has ended."""
        into, done = pending.into, pending.done
        if into is None or done is None:
            return
        if done.done():
            done.exception()
            self._reader.give_back(into)
        else:
            done.cancel()  # the reader gives the staging back once NIXL is done with it


def _ready(sock: socket.socket) -> bool:
    notice_dead_peers(sock)
    return True
