"""Reads one incoming connection of the socket transports: decodes frames, receives blocks directly in their places.

Knows nothing of listening, of other lanes or of what frames mean; it passes them to its ``IncomingStream``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.kv.memory import block_sums
from baton.kv.wire import frames
from baton.kv.wire.frames import HEADER_BYTES, PIECE_BYTES, Frame
from baton.kv.wire.incoming import IncomingStream
from baton.kv.wire.poller import Poller
from baton.kv.wire.secured import holds_bytes
from baton.protos.errors import BatonError, CorruptFrame

log = logging.getLogger("baton.kv")

TURN_BYTES = 1 << 20  # bytes read in one turn of the event loop, so that other tasks get theirs
MAX_VECTORS = 64  # places of one scatter read
HELLO_S = 5.0  # seconds that a connection has for its hello
# Seconds that a frame waits for those before it on other lanes, which normally takes less than a round trip.
OVERTAKEN_S = 5.0
# Most bytes of a frame's body before a lease was shown; an OPEN has some hundred, a full table of blocks 52 KiB.
STRANGERS_BODY_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Landing:
    """Tracks the blocks of one frame while they are received in their ``places``, in order, and hashes them piece
    by piece.

    The sender's checksums came with the frame, or follow the blocks' bytes.
    """

    def __init__(self, frame: Frame, places: Sequence[memoryview]) -> None:
        self.checksums: list[int] = []
        self._frame = frame
        self._places = places
        self._at = 0
        self._sums = block_sums.used()
        self._digest = self._sums.digest()
        self._trailer = memoryview(bytearray(frames.trailer_bytes(frame)))
        self._trailed = 0

    @property
    def done(self) -> bool:
        """Returns whether every byte has been received."""
        return len(self.checksums) == len(self._places) and self._trailed == len(self._trailer)

    @property
    def frame(self) -> Frame:
        """Returns the frame with the sender's checksums; valid only once ``done``."""
        return frames.with_trailer(self._frame, self._trailer) if self._frame.trailing else self._frame

    def room(self) -> list[memoryview]:
        """Returns the views into which the next bytes are to be received, in order."""
        first, unit = len(self.checksums), self._frame.unit
        if first == len(self._places):
            return [self._trailer[self._trailed :]]
        if self._at or unit >= PIECE_BYTES:
            views, ends = [self._places[first][self._at : self._at + PIECE_BYTES]], unit - self._at <= PIECE_BYTES
        else:
            views, ends = list(self._places[first : first + max(1, min(MAX_VECTORS, PIECE_BYTES // unit))]), True
        if self._trailer and ends and first + len(views) == len(self._places):
            views.append(self._trailer)
        return views

    def advance(self, count: int) -> None:
        """Records that ``count`` bytes were received in the views of ``room``, and hashes the blocks that are
        complete.
        """
        unit = self._frame.unit
        while count:
            if len(self.checksums) == len(self._places):
                self._trailed += count
                return
            place = self._places[len(self.checksums)]
            taken = min(count, unit - self._at)
            count -= taken
            if taken == unit:
                self.checksums.append(self._sums.of(place))
                continue
            self._digest.update(place[self._at : self._at + taken])
            self._at += taken
            if self._at == unit:
                self.checksums.append(self._digest.intdigest())
                self._at = 0
                self._digest.reset()


class InletServer(Protocol):
    """The server that accepted a connection. A stream's first ``hello_bytes`` bytes name it."""

    hello_bytes: int
    poller: Poller

    def enter(self, inlet: Inlet, said: bytes, fds: list[int]) -> IncomingStream:
        """Returns the stream that the hello ``said`` names. Raises CorruptFrame."""

    def gone(self, inlet: Inlet) -> None:
        """Removes a connection that was closed."""


class Inlet:
    """Reads the frames of one incoming connection, one after the other."""

    def __init__(self, sock: socket.socket, server: InletServer) -> None:
        self.incoming: IncomingStream | None = None
        self.sock = sock
        self._server = server
        self._buffer = bytearray(max(4096, server.hello_bytes))
        self._got, self._want = 0, server.hello_bytes
        self._landing: Landing | None = None
        self._held: Frame | None = None
        self._fds: list[int] = []
        self._closed = False
        self._server.poller.reads(sock.fileno(), self._readable)
        asyncio.get_running_loop().call_later(HELLO_S, self._expect_hello)

    def close(self, reset: bool = False) -> None:
        """Closes the connection at once. With ``reset`` its peer sees a broken stream even if nothing was in
        flight.
        """
        if self._closed:
            return
        self._closed = True
        self._server.poller.forget(self.sock.fileno())
        if reset:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.sock.close()
        for fd in self._fds:
            os.close(fd)
        self._server.gone(self)

    def _expect_hello(self) -> None:
        if self.incoming is None:
            self.close(reset=True)

    def release(self) -> None:
        """Processes a frame that was held back, if those sent before it have come on other lanes; drops it if the
        stream has ended.
        """
        frame, incoming = self._held, self.incoming
        if frame is None or incoming is None or self._closed:
            return
        if incoming.ended or not (incoming.overtook(frame) or incoming.busy()):
            self._held = None
            self._server.poller.reads(self.sock.fileno(), self._readable)
            if not incoming.ended:
                self._guarded(lambda: self._frame(frame, incoming))
            self.look_again()

    def _hold(self, frame: Frame, incoming: IncomingStream) -> None:
        """Holds ``frame`` back until those before it have come, and reads nothing more on this lane meanwhile."""
        self._held = frame
        self._server.poller.reads(self.sock.fileno(), None)
        if frame.kind in frames.WITH_BLOCKS and incoming.overtook(frame):
            asyncio.get_running_loop().call_later(OVERTAKEN_S, self._overdue, frame, incoming)

    def _overdue(self, frame: Frame, incoming: IncomingStream) -> None:
        if self._held is frame and not incoming.ended:
            incoming.sink.over(
                CorruptFrame(f"a frame of blocks came, one before it not in {OVERTAKEN_S:g} s", "subject")
            )

    def look_again(self) -> None:
        """Schedules another read if decrypted bytes wait in the socket, which no epoll reports."""
        if not self._closed and self._held is None and holds_bytes(self.sock):
            asyncio.get_running_loop().call_soon(self._readable)

    def _readable(self) -> None:
        if not self._closed:
            self._guarded(self._turn)
            self.look_again()

    def _guarded(self, act: Callable[[], object]) -> None:
        """Calls ``act``; any failure ends this stream alone."""
        try:
            act()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._lost()
        except BatonError as error:
            if self.incoming is None:
                self.close(reset=True)
            else:
                self.incoming.sink.over(error)
        except Exception:  # a bug of ours ends this stream, not the process
            log.exception("a handoff stream failed")
            self._lost()

    def _turn(self) -> None:
        left = TURN_BYTES
        while left > 0 and not self._closed and self._held is None:
            count = self._step()
            if not count:
                self._lost()
                return
            left -= count

    def _step(self) -> int:
        """Reads once; returns how many bytes were processed, 0 at the end."""
        if self.incoming is not None and self.incoming.ended:
            return len(self.sock.recv(PIECE_BYTES))  # what was in flight then: unread, it would reset our replies
        if self._landing is not None:
            return self._land(self._landing)
        count = self._fill()
        if count and self._got == self._want:
            return count + self._complete()
        return count

    def _fill(self) -> int:
        if self.incoming is None:
            return self._fill_hello()
        count = self.sock.recv_into(memoryview(self._buffer)[self._got : self._want])
        self._got += count
        return count

    def _fill_hello(self) -> int:
        count = self._want - self._got
        if self.sock.family != socket.AF_UNIX:
            data = self.sock.recv(count)
        else:
            data, fds, *_ = socket.recv_fds(self.sock, count, 1)
            self._fds += fds
        self._buffer[self._got : self._got + len(data)] = data
        self._got += len(data)
        return len(data)

    def _complete(self) -> int:
        """Handles a complete hello, header, or header with its body; returns how many bytes were fetched from
        elsewhere.
        """
        if self.incoming is None:
            self.incoming = self._server.enter(self, bytes(self._buffer[: self._want]), self._fds)
        elif self._want == HEADER_BYTES and (body := frames.body_bytes(self._buffer)):
            if body > STRANGERS_BODY_BYTES and not self.incoming.known:
                raise CorruptFrame(f"a body of {body} bytes comes before any lease was shown", "frame")
            self._want += body
            if len(self._buffer) < self._want:  # a new one: frames decoded earlier may still borrow the old
                self._buffer = self._buffer[:HEADER_BYTES] + bytearray(body)
            return 0
        else:
            frame = frames.decode(memoryview(self._buffer)[: self._want])
            self._got, self._want = 0, HEADER_BYTES
            return self._frame(frame, self.incoming)
        self._got, self._want = 0, HEADER_BYTES
        return 0

    def _frame(self, frame: Frame, incoming: IncomingStream) -> int:
        if incoming.overtook(frame) or incoming.busy():
            self._hold(frame, incoming)
            return 0
        if frame.kind not in frames.WITH_BLOCKS:
            incoming.take(frame)
            return 0
        if frame.elsewhere:
            return incoming.fetch(frame)
        if not frame.blocks or not frame.unit:
            raise CorruptFrame("a frame of blocks without bytes", "unit")
        places = incoming.sink.place(frame)
        if places is not None:
            self._landing = Landing(frame, places)
        return 0

    def _land(self, landing: Landing) -> int:
        room = landing.room()
        count = self.sock.recv_into(room[0]) if len(room) == 1 else self.sock.recvmsg_into(room)[0]
        landing.advance(count)
        if landing.done and self.incoming is not None:
            self._landing = None
            self.incoming.has_landed(landing.frame, landing.checksums)
        return count

    def _lost(self) -> None:
        if self.incoming is None:
            self.close(reset=True)
        else:
            self.incoming.abort()
