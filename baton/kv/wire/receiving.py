"""Listens for streams of the socket transports (tcp, shm), and makes an ``IncomingStream`` for each.

Knows nothing of what frames mean. Everything runs on the event loop, a bounded number of bytes at a time, so that
other tasks can run.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from baton.kv.wire import frames
from baton.kv.wire.base import Accept
from baton.kv.wire.frames import Frame, Kind
from baton.kv.wire.incoming import IncomingStream
from baton.kv.wire.inlet import Inlet
from baton.kv.wire.poller import Poller
from baton.kv.wire.secured import TlsHandshake
from baton.kv.wire.sending import ANCHOR, HELLO, MAGIC, VERSION
from baton.kv.wire.unleased import UnleasedConnections
from baton.protos.errors import CorruptFrame
from baton.tls.identity import Identity
from baton.tls.sockets import TlsSocket, accepting

log = logging.getLogger("baton.kv")

IDLE_S = 15.0  # seconds after which a stream without a lease is closed if no blocks come
MAX_CONNECTIONS = 4096  # of one listening socket
# Seconds without accepting when no descriptor is left; the listener stays readable, which would be a busy loop.
REST_S = 0.25
SCARCE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


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
        self._inlets: dict[Inlet, None] = {}  # in the order in which they came
        self._handshakes: dict[TlsHandshake, None] = {}
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
        self._inlets.pop(inlet, None)
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
        self._inlets[inlet] = None
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
        self._handshakes[handshake] = None
        self.unleased.add(handshake, peer[0])
        handshake.begin()

    def _left(self, handshake: TlsHandshake) -> str:
        self._handshakes.pop(handshake, None)
        return self.unleased.remove(handshake)

    def _secured(self, handshake: TlsHandshake, sock: TlsSocket) -> None:
        self._entered(sock, self._left(handshake)).look_again()
