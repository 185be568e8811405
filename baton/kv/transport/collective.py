"""The receiving side of the nccl transport: channels kept for their senders, and one session for each stream.

Knows nothing of what frames mean, and imports no torch (nccl.py says how it works).
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque

import msgspec

from baton.kv import copying
from baton.kv.transport import tcp
from baton.kv.transport.base import Accept
from baton.kv.transport.channels import READY, STREAM_ID, Channel, parts
from baton.kv.transport.frames import Frame
from baton.kv.transport.inlet import Inlet
from baton.kv.transport.moving import Broken, Done, Join, Joined, MoverClient
from baton.kv.transport.receiving import Session, SocketServer
from baton.kv.transport.sending import HELLO, MAGIC, VERSION
from baton.protos.errors import CorruptFrame

IDLE_S = 60.0


class NcclServer(SocketServer):
    """Keeps the receiving ends of channels, while senders use them."""

    def __init__(
        self, sock: socket.socket, meeting: socket.socket, host: str, accept: Accept, mover: MoverClient
    ) -> None:
        super().__init__(sock, accept, _ready)
        self._channels: dict[bytes, Receiving] = {}
        self._meeting, self._host, self._mover = meeting, host, mover
        mover.serve(host, meeting)

    def close(self) -> None:
        """Stop listening, break every stream, leave every channel."""
        super().close()
        for channel in self._channels.values():
            channel.leave()
        self._channels.clear()
        self._mover.close()
        self._meeting.close()

    def enter(self, inlet: Inlet, said: bytes, fds: list[int]) -> Session:
        """A stream on a channel that is in step with its sender's. Raises CorruptFrame."""
        magic, version, _, pages, stream = HELLO.unpack(said)
        if magic != MAGIC or version != VERSION:
            raise CorruptFrame(f"not a handoff of this protocol: {said[:8]!r}", "hello")
        group, count, _ = STREAM_ID.unpack(stream)
        channel = self._channel(group, count, pages << 12, inlet.sock.getsockname()[0])
        session = self.sessions[stream] = NcclSession(self._accept, self, stream, channel)
        session.join(inlet, 0)
        return session

    def _channel(self, group: bytes, count: int, half_bytes: int, own_host: str) -> Receiving:
        now = asyncio.get_running_loop().time()
        for known, old in tuple(self._channels.items()):
            if old.why or (not old.session and now - old.used > IDLE_S):
                self._drop(known)
        channel = self._channels.get(group)
        if channel is None and not count and half_bytes:
            name, port = group.hex(), self._meeting.getsockname()[1]
            join = Join(f"0-{name}", name, 0, self._host, port, own_host, 0)
            channel = self._channels[group] = Receiving(self._mover, join, half_bytes)
        elif channel is None:
            raise CorruptFrame("no such channel here: open another", "hello")
        elif channel.session is not None or channel.waiting or channel.count != count:
            self._drop(group)
            raise CorruptFrame(f"the channel is at message {channel.count}, not {count}: open another", "hello")
        channel.used = now
        return channel

    def _drop(self, group: bytes) -> None:
        channel = self._channels.pop(group)
        if channel.session is not None:
            channel.session.abort()
        channel.leave()


class Expected(msgspec.Struct):
    """A message that was announced: some blocks of a frame; ``places`` and ``checksums`` are the whole frame's."""

    frame: Frame
    session: NcclSession
    blocks: range
    is_last: bool
    places: list[memoryview]
    checksums: list[int]


class Receiving(Channel):
    """A receiving end: messages that were announced, in order, at most two of them under way."""

    def __init__(self, mover: MoverClient, join: Join, half_bytes: int) -> None:
        self.session: NcclSession | None = None
        self.waiting: deque[Expected] = deque()
        self.used = 0.0
        super().__init__(mover, join, half_bytes)

    def expect(self, frame: Frame, session: NcclSession) -> None:
        """The next messages carry ``frame``'s blocks."""
        places, checksums = list[memoryview](), list[int]()
        messages = parts(frame, self.half_bytes)
        self.waiting += [Expected(frame, session, m, m == messages[-1], places, checksums) for m in messages]
        self._post()

    def hear(self, message: Joined | Done | Broken) -> None:
        """The mover says: a message is here, in its half of the staging memory."""
        super().hear(message)
        if isinstance(message, Done):
            expected = self.waiting.popleft()
            expected.session.arrived(expected, copying.address(self.half(self.done - 1)))
            self._post()
        elif isinstance(message, Broken) and self.session is not None:
            self.session.abort()

    def _post(self) -> None:
        for expected in list(itertools.islice(self.waiting, self.count - self.done, 2)):
            self.move(len(expected.blocks) * expected.frame.unit)


class NcclSession(Session):
    """A stream whose blocks come over a channel."""

    def __init__(self, accept: Accept, server: SocketServer, stream: bytes, channel: Receiving) -> None:
        super().__init__(accept, server, stream)
        self._channel, channel.session = channel, self
        self._out += READY

    def fetch(self, frame: Frame) -> int:
        """Its blocks will be in staging memory soon; later frames without blocks wait for them."""
        if not frame.blocks or not 0 < frame.unit <= self._channel.half_bytes:
            raise CorruptFrame(f"blocks of {frame.unit} bytes are no messages of this channel", "unit")
        self._channel.expect(frame, self)
        return 1

    def arrived(self, expected: Expected, at: int) -> None:
        """Copy each block into its place, unless the stream has ended."""
        if not self.ended and expected.blocks.start == 0:
            expected.places += self.sink.place(expected.frame) or ()
        if self.ended or not expected.places:
            return
        unit, here = expected.frame.unit, expected.places[expected.blocks.start : expected.blocks.stop]
        expected.checksums += copying.copy_from(here, [at + number * unit for number in range(len(here))])
        if expected.is_last:
            self.has_landed(expected.frame, expected.checksums)

    def over(self) -> None:
        """No lane is left: another stream may use the channel."""
        if self._channel.session is self:
            self._channel.session = None
            self._channel.used = asyncio.get_running_loop().time()


def _ready(sock: socket.socket) -> bool:
    """As for tcp: a lease's random id is what opens it."""
    tcp.notice_dead_peers(sock)
    return True
