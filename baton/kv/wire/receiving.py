"""The receiver's end of streams over sockets (tcp, shm): who listens, and one Session for each stream.

Knows nothing of what frames mean: a Sink says where blocks land. Everything runs on the event loop, a bounded
number of bytes at a time, so that other work of the process goes on; when a stream is ended nothing more is written
where its blocks were to land, because there is no other thread that could.
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
from baton.kv.wire.guests import Strangers
from baton.kv.wire.inlet import Inlet
from baton.kv.wire.poller import Poller
from baton.kv.wire.secured import Arrival
from baton.kv.wire.sending import ANCHOR, HELLO, MAGIC, VERSION
from baton.protos.errors import CorruptFrame, HandoffRefused
from baton.tls.identity import Identity
from baton.tls.sockets import TlsSocket, accepting

log = logging.getLogger("baton.kv")

LINGER_S = 1.0
IDLE_S = 15.0  # of a stream that has shown no lease: nothing comes, and it is closed
MAX_CONNECTIONS = 4096
MAX_LANES = 32  # of one stream
REST_S = 0.25  # of a port that can accept nothing, because a listener stays readable
SCARCE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Session:
    """One stream: a Line to its Sink, over one lane or several."""

    def __init__(self, accept: Accept, server: SocketServer, stream: bytes) -> None:
        self.inlets: list[Inlet] = []
        self.primary: Inlet | None = None
        self.landed = self.taken = 0  # frames with blocks, and without
        self.ended = False
        self.stream = stream
        self.heard_at = asyncio.get_running_loop().time()
        self._server = server
        self._out = bytearray()
        self.sink = accept(self)

    @property
    def known(self) -> bool:
        """Whether the sender has shown a lease: its first frame was taken, and it was not refused."""
        return bool(self.taken) and not self.ended

    def join(self, inlet: Inlet, lane: int) -> None:
        """One more lane; replies go out on lane 0. Raises CorruptFrame where there are too many."""
        if len(self.inlets) >= MAX_LANES:
            raise CorruptFrame(f"a stream has at most {MAX_LANES} lanes", "hello")
        self.inlets.append(inlet)
        if self.known:
            self._server.strangers.remove(inlet)
        if lane == 0:
            self.primary = inlet
            self._flush()

    def has_landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        """All blocks of one frame are in; ``resident``: in the device's pages, too."""
        self.landed += 1
        self.heard_at = asyncio.get_running_loop().time()
        self.sink.landed(frame, checksums, resident)
        self._release()

    def overtook(self, frame: Frame) -> bool:
        """Whether frames that were sent before this one are still to come, on other lanes."""
        return self.taken < frame.subject if frame.kind in frames.WITH_BLOCKS else self.landed < frame.sequence

    def take(self, frame: Frame) -> None:
        """A frame without blocks, in its turn."""
        self.taken += 1
        self.sink.take(frame)
        if self.known:
            for inlet in self.inlets:
                self._server.strangers.remove(inlet)
        self._release()

    def _release(self) -> None:
        """What waited on other lanes for a frame before it may go on."""
        for inlet in tuple(self.inlets):
            inlet.release()

    def fetch(self, frame: Frame) -> int:
        """The blocks lie in the sender's memory: copy them here; how many bytes that were."""
        raise CorruptFrame("this transport carries the blocks' bytes on the stream", "flags")

    def reply(self, frame: bytes) -> None:
        """Send it now, or when the socket takes more."""
        if not self.ended:
            self._out += frame
            self._flush()

    def end(self) -> None:
        """Say goodbye, then read and drop what is still in flight until the sender has closed."""
        if self.ended:
            return
        self.settle()
        self._out += frames.encode(Frame(Kind.END))
        self.ended = True
        self._flush()
        self._release()
        asyncio.get_running_loop().call_later(LINGER_S, self._forget, False)

    def abort(self) -> None:
        """The stream is broken, or over at the sender's end: no goodbye."""
        self.settle()
        reset, self.ended = not self.ended, True
        self.sink.over(None)
        self._forget(reset)

    def settle(self) -> None:
        """Wait for whatever else than this thread writes where blocks were to land: nothing is written after."""

    def _forget(self, reset: bool) -> None:
        self._server.sessions.pop(self.stream, None)
        for inlet in tuple(self.inlets):
            inlet.close(reset)

    def over(self) -> None:
        """No lane is left."""

    def end_if_idle(self) -> None:
        """Nobody holds a connection for ever without a lease; called again while there is none."""
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
    """Listens on ``sock`` and makes a Session of each stream. ``admit`` says whether a peer may speak at all;
    with an ``identity`` it must speak TLS, and show the certificate of a worker.

    A stream without a lease from which nothing comes for ``idle_s`` is ended, but on a unix socket, where a peer is
    of our own user.
    """

    idle_s = IDLE_S

    def __init__(
        self,
        sock: socket.socket,
        accept: Accept,
        admit: Callable[[socket.socket], bool],
        identity: Identity | None = None,
    ) -> None:
        self.sessions: dict[bytes, Session] = {}
        self._accept = accept
        self._admit = admit
        self._sock = sock
        self._identity = identity
        self.strangers = Strangers()
        self._inlets: set[Inlet] = set()
        self._arrivals: set[Arrival] = set()
        self._rests = False
        sock.setblocking(False)
        self.poller = Poller()
        self.poller.reads(sock.fileno(), self._incoming)

    def close(self) -> None:
        """Stop listening and break every stream."""
        if self._sock.fileno() >= 0:
            self.poller.forget(self._sock.fileno())
            self._sock.close()
        for session in tuple(self.sessions.values()):
            session.abort()
        for inlet in tuple(self._inlets):
            inlet.close(reset=True)
        for arrival in tuple(self._arrivals):
            arrival.close()
        self.poller.close()

    def enter(self, inlet: Inlet, said: bytes, fds: list[int]) -> Session:
        """A connection said hello. Raises CorruptFrame."""
        magic, version, lane, newest, stream = HELLO.unpack(said)
        if magic != MAGIC or version != VERSION:
            raise CorruptFrame(f"not a handoff of this protocol: {said[:8]!r}", "hello")
        session = self.sessions.get(stream)
        if session is None:
            session = self.sessions[stream] = self.session(stream, lane == ANCHOR, fds)
            if self._sock.family != socket.AF_UNIX:
                session.end_if_idle()
        session.join(inlet, lane)
        if lane == 0 and (known := min(newest, frames.NEWEST)) > VERSION:
            session.reply(frames.encode(Frame(Kind.GREETING, subject=known)))
        return session

    def session(self, stream: bytes, anchor: bool, fds: list[int]) -> Session:
        """The first connection of a stream is here."""
        return Session(self._accept, self, stream)

    def gone(self, inlet: Inlet) -> None:
        """It is closed."""
        self._inlets.discard(inlet)
        self.strangers.remove(inlet)
        if inlet.session is not None and inlet in inlet.session.inlets:
            inlet.session.inlets.remove(inlet)
            if not inlet.session.inlets:
                self.sessions.pop(inlet.session.stream, None)
                inlet.session.over()

    def _incoming(self) -> None:
        try:
            sock, peer = self._sock.accept()
        except OSError as error:
            if error.errno in SCARCE:
                self._rest(error)
            return
        self._rests = False
        sock.setblocking(False)
        if len(self._inlets) + len(self._arrivals) >= MAX_CONNECTIONS or not self._admit(sock):
            sock.close()
        elif self._identity is None:
            self._entered(sock, peer[0] if peer else "")
        else:
            self._secure(sock, peer, self._identity)

    def _rest(self, error: OSError) -> None:
        """No descriptor is left: a stranger gives his back, and nobody is accepted for a moment."""
        if not self._rests:
            log.warning("no sender of KV can be accepted for now: %s", error.strerror)
        self._rests = True
        self.strangers.make_room()
        self.poller.reads(self._sock.fileno(), None)
        asyncio.get_running_loop().call_later(REST_S, self._listen)

    def _listen(self) -> None:
        if self._sock.fileno() >= 0:
            self.poller.reads(self._sock.fileno(), self._incoming)

    def _entered(self, sock: socket.socket, address: str) -> Inlet:
        inlet = Inlet(sock, self)
        self._inlets.add(inlet)
        if address:
            self.strangers.add(inlet, address)
        return inlet

    def _secure(self, sock: socket.socket, peer: tuple[str, int], identity: Identity) -> None:
        try:
            secured = accepting(sock, identity)
        except OSError:  # it is gone already
            sock.close()
            return
        arrival = Arrival(secured, f"{peer[0]}:{peer[1]}", identity, self.poller, self._arrived, self._left)
        self._arrivals.add(arrival)
        self.strangers.add(arrival, peer[0])
        arrival.begin()

    def _left(self, arrival: Arrival) -> str:
        self._arrivals.discard(arrival)
        return self.strangers.remove(arrival)

    def _arrived(self, arrival: Arrival, sock: TlsSocket) -> None:
        self._entered(sock, self._left(arrival)).look_again()
