"""Receives streams over sockets (tcp, shm): a server that listens, and one ``IncomingStream`` for each stream.

Knows nothing of what frames mean: a ``Sink`` says where blocks are written. Everything runs on the event loop, a
bounded number of bytes at a time, so that other tasks can run. Once a stream has ended, nothing more is written to
its blocks' places, because no other thread writes there.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence

from baton.kv.wire import frames
from baton.kv.wire.base import Accept
from baton.kv.wire.frames import Frame, Kind
from baton.kv.wire.inlet import Inlet
from baton.kv.wire.poller import Poller
from baton.kv.wire.secured import TlsHandshake
from baton.kv.wire.sending import ANCHOR, HELLO, MAGIC, VERSION
from baton.kv.wire.unleased import UnleasedConnections
from baton.protos.errors import CorruptFrame, HandoffRefused
from baton.tls.identity import Identity
from baton.tls.sockets import TlsSocket, accepting

log = logging.getLogger("baton.kv")

LINGER_S = 1.0  # seconds for which an ended stream is still read, so that a reset doesn't drop the last replies
IDLE_S = 15.0  # seconds after which a stream without a lease is closed if no blocks come
MAX_CONNECTIONS = 4096  # of one listening socket
MAX_LANES = 32  # connections of one stream
# Seconds without accepting when no descriptor is left; the listener stays readable, which would be a busy loop.
REST_S = 0.25
SCARCE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class IncomingStream:
    """Receives one stream, over one or more lanes (connections), for the ``Sink`` that takes its frames."""

    def __init__(self, accept: Accept, server: SocketServer, stream_id: bytes) -> None:
        self.inlets: list[Inlet] = []
        self.primary: Inlet | None = None
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

    def join(self, inlet: Inlet, lane: int) -> None:
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


class SocketServer:
    """Listens on ``sock`` and makes an ``IncomingStream``, whose sink ``accept`` returns, for each stream.

    ``admit`` returns whether a peer may connect. With an ``identity`` the peer must use TLS and a worker's
    certificate. A stream without a lease that sends nothing for ``idle_s`` seconds is ended, except on a unix
    socket, where a peer runs as our own user.
    """

    idle_s = IDLE_S
    hello_bytes = HELLO.size  # size of the hello, with which a connection begins

    def __init__(
        self,
        sock: socket.socket,
        accept: Accept,
        admit: Callable[[socket.socket], bool],
        identity: Identity | None = None,
    ) -> None:
        self.streams: dict[bytes, IncomingStream] = {}
        self._accept = accept
        self._admit = admit
        self._sock = sock
        self._identity = identity
        self.unleased = UnleasedConnections()
        self._inlets: set[Inlet] = set()
        self._handshakes: set[TlsHandshake] = set()
        self._rests = False
        sock.setblocking(False)
        self.poller = Poller()
        self.poller.reads(sock.fileno(), self._incoming)

    def close(self) -> None:
        """Stops listening and breaks every stream."""
        if self._sock.fileno() >= 0:
            self.poller.forget(self._sock.fileno())
            self._sock.close()
        for incoming in tuple(self.streams.values()):
            incoming.abort()
        for inlet in tuple(self._inlets):
            inlet.close(reset=True)
        for handshake in tuple(self._handshakes):
            handshake.close()
        self.poller.close()

    def enter(self, inlet: Inlet, said: bytes, fds: list[int]) -> IncomingStream:
        """Returns the stream that a connection's hello (``said``) names, which is new for its first connection.
        Raises CorruptFrame.
        """
        magic, version, lane, newest, stream_id = HELLO.unpack(said)
        if magic != MAGIC or version != VERSION:
            raise CorruptFrame(f"not a handoff of this protocol: {said[:8]!r}", "hello")
        incoming = self.streams.get(stream_id)
        if incoming is None:
            incoming = self.streams[stream_id] = self.incoming(stream_id, lane == ANCHOR, fds)
            if self._sock.family != socket.AF_UNIX:
                incoming.end_if_idle()
        incoming.join(inlet, lane)
        if lane == 0 and (known := min(newest, frames.NEWEST)) > VERSION:
            incoming.reply(frames.encode(Frame(Kind.GREETING, subject=known)))
        return incoming

    def incoming(self, stream_id: bytes, anchor: bool, fds: list[int]) -> IncomingStream:
        """Returns a new stream for its first connection; transports override it, to use the descriptors ``fds``
        that came with the hello.
        """
        return IncomingStream(self._accept, self, stream_id)

    def gone(self, inlet: Inlet) -> None:
        """Removes a closed connection, and its stream if that was the last lane."""
        self._inlets.discard(inlet)
        self.unleased.remove(inlet)
        if inlet.incoming is not None and inlet in inlet.incoming.inlets:
            inlet.incoming.inlets.remove(inlet)
            if not inlet.incoming.inlets:
                self.streams.pop(inlet.incoming.stream_id, None)
                inlet.incoming.over()

    def _incoming(self) -> None:
        try:
            sock, peer = self._sock.accept()
        except OSError as error:
            if error.errno in SCARCE:
                self._rest(error)
            return
        self._rests = False
        sock.setblocking(False)
        if len(self._inlets) + len(self._handshakes) >= MAX_CONNECTIONS or not self._admit(sock):
            sock.close()
        elif self._identity is None:
            self._entered(sock, peer[0] if peer else "")
        else:
            self._secure(sock, peer, self._identity)

    def _rest(self, error: OSError) -> None:
        """Stops accepting for a moment because no descriptor is left, and closes a connection without a lease."""
        if not self._rests:
            log.warning("no sender of KV can be accepted for now: %s", error.strerror)
        self._rests = True
        self.unleased.make_room()
        self.poller.reads(self._sock.fileno(), None)
        asyncio.get_running_loop().call_later(REST_S, self._listen)

    def _listen(self) -> None:
        if self._sock.fileno() >= 0:
            self.poller.reads(self._sock.fileno(), self._incoming)

    def _entered(self, sock: socket.socket, address: str) -> Inlet:
        inlet = Inlet(sock, self)
        self._inlets.add(inlet)
        if address:
            self.unleased.add(inlet, address)
        return inlet

    def _secure(self, sock: socket.socket, peer: tuple[str, int], identity: Identity) -> None:
        try:
            secured = accepting(sock, identity)
        except OSError:  # it is gone already
            sock.close()
            return
        handshake = TlsHandshake(secured, f"{peer[0]}:{peer[1]}", identity, self.poller, self._secured, self._left)
        self._handshakes.add(handshake)
        self.unleased.add(handshake, peer[0])
        handshake.begin()

    def _left(self, handshake: TlsHandshake) -> str:
        self._handshakes.discard(handshake)
        return self.unleased.remove(handshake)

    def _secured(self, handshake: TlsHandshake, sock: TlsSocket) -> None:
        self._entered(sock, self._left(handshake)).look_again()
