"""Receives streams by the nccl transport, and keeps channels for their senders.

Knows nothing of what frames mean, and imports no torch (nccl.py says how it works).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Sequence

import msgspec

from baton.kv.memory.device_pages import DevicePages
from baton.kv.wire.base import Accept
from baton.kv.wire.channels import READY, STREAM_ID, StagingChannel, parts
from baton.kv.wire.frames import Frame
from baton.kv.wire.incoming import IncomingStream
from baton.kv.wire.inlet import Inlet
from baton.kv.wire.keepalive import notice_dead_peers
from baton.kv.wire.moving import ChannelBroken, ChannelJoined, JoinChannel, MoveDone, MoverClient
from baton.kv.wire.receiving import SocketServer
from baton.kv.wire.sending import HELLO, MAGIC, VERSION
from baton.protos.errors import ConfigError, CorruptFrame

log = logging.getLogger("baton.kv")

IDLE_S = 60.0  # seconds that a channel without a stream is kept for its sender's next one
JOINING_S = 90.0  # seconds for a stream to show a lease, because a sender's mover loads torch first


class NcclServer(SocketServer):
    """Receives streams by the nccl transport and keeps their channels (torch.distributed groups) while senders use
    them.
    """

    idle_s = JOINING_S

    def __init__(
        self,
        sock: socket.socket,
        meeting: socket.socket,
        host: str,
        accept: Accept,
        mover: MoverClient,
        pages: DevicePages | None = None,
        at_once: bool = True,
    ) -> None:
        super().__init__(sock, accept, _ready)
        self._pages = pages
        self._channels: dict[bytes, ReceivingChannel] = {}
        self._meeting, self._host, self._mover = meeting, host, mover
        mover.serve(host, meeting, at_once)

    def close(self) -> None:
        """Stops listening, breaks every stream and closes every channel and the mover."""
        super().close()
        for channel in self._channels.values():
            channel.leave()
        self._channels.clear()
        self._mover.close()
        self._meeting.close()

    def enter(self, inlet: Inlet, said: bytes, fds: list[int]) -> IncomingStream:
        """Returns a new stream for the hello ``said``, on a channel with as many messages so far as its sender
        counts. Raises CorruptFrame.
        """
        magic, version, _, pages, stream_id = HELLO.unpack(said)
        if magic != MAGIC or version != VERSION:
            raise CorruptFrame(f"not a handoff of this protocol: {said[:8]!r}", "hello")
        group, count, _ = STREAM_ID.unpack(stream_id)
        channel = self._channel(group, count, pages << 12, inlet.sock.getsockname()[0])
        incoming = self.streams[stream_id] = NcclIncomingStream(self._accept, self, stream_id, channel)
        channel.serve(incoming)
        incoming.end_if_idle()
        incoming.join(inlet, 0)
        return incoming

    def _channel(self, group: bytes, count: int, half_bytes: int, own_host: str) -> ReceivingChannel:
        now = asyncio.get_running_loop().time()
        for known, old in tuple(self._channels.items()):
            if old.why or (not old.incoming and now - old.used > IDLE_S):
                self._drop(known)
        channel = self._channels.get(group)
        if channel is None and not count and half_bytes:
            name, port = group.hex(), self._meeting.getsockname()[1]
            join = JoinChannel(f"0-{name}", name, 0, self._host, port, own_host, 0)
            channel = self._channels[group] = ReceivingChannel(self._mover, join, half_bytes, self._pages)
        elif channel is None:
            raise CorruptFrame("no such channel here: open another", "hello")
        elif channel.incoming is not None or channel.waiting or channel.count != count:
            self._drop(group)
            raise CorruptFrame(f"the channel is at message {channel.count}, not {count}: open another", "hello")
        channel.used = now
        return channel

    def _drop(self, group: bytes) -> None:
        channel = self._channels.pop(group)
        if channel.incoming is not None:
            channel.incoming.abort()
        channel.leave()


class ExpectedMessage(msgspec.Struct):
    """An announced message, which carries some blocks of a frame. ``places`` and ``checksums`` are those of the
    whole frame.
    """

    frame: Frame
    incoming: NcclIncomingStream
    blocks: range  # indices, in the frame, of the blocks it carries
    is_last: bool  # of its frame
    places: list[memoryview]
    checksums: list[int]


class ReceivingChannel(StagingChannel):
    """The receiving end of a channel (torch.distributed group): receives announced messages in order, at most two
    at a time.
    """

    def __init__(self, mover: MoverClient, join: JoinChannel, half_bytes: int, pages: DevicePages | None) -> None:
        self.incoming: NcclIncomingStream | None = None
        self.waiting: deque[ExpectedMessage] = deque()
        self.used, self.emptied = 0.0, 0  # messages whose half of staging is free again
        super().__init__(mover, join, half_bytes, pages)

    def serve(self, incoming: NcclIncomingStream) -> None:
        """Aborts ``incoming``, until it ends, if the channel breaks."""
        self.incoming = incoming

    def expect(self, frame: Frame, incoming: NcclIncomingStream) -> None:
        """Announces that the next messages carry the blocks of ``frame``."""
        places, checksums = list[memoryview](), list[int]()
        messages = parts(frame, self.half_bytes)
        self.waiting += [
            ExpectedMessage(frame, incoming, m, m == messages[-1], places, checksums) for m in messages
        ]
        self._post()

    def hear(self, message: ChannelJoined | MoveDone | ChannelBroken) -> None:
        """Handles a report of the mover; ``MoveDone`` says that a message is complete in its half of the staging
        memory.
        """
        super().hear(message)
        if isinstance(message, MoveDone):
            expected = self.waiting.popleft()
            copied = expected.incoming.arrived(expected, self.done - 1)
            if copied is None:
                self._empty()
            else:
                copied.add_done_callback(lambda _: self._empty())
        elif isinstance(message, ChannelBroken) and self.incoming is not None:
            self.incoming.abort()

    def _empty(self) -> None:
        self.emptied += 1
        if not self.why:
            self._post()

    def _post(self) -> None:
        while self.count - self.emptied < 2 and len(self.waiting) > self.count - self.done:
            expected = self.waiting[self.count - self.done]
            self.move(len(expected.blocks) * expected.frame.unit)


class NcclIncomingStream(IncomingStream):
    """Receives a stream whose blocks come over a channel, a torch.distributed group of two."""

    def __init__(self, accept: Accept, server: SocketServer, stream_id: bytes, channel: ReceivingChannel) -> None:
        super().__init__(accept, server, stream_id)
        self._channel = channel
        self._copying: list[asyncio.Future[list[int]]] = []
        self._out += READY

    def fetch(self, frame: Frame) -> int:
        """Announces to the channel that the blocks of ``frame`` follow; later frames without blocks wait for them.
        Returns 1. Raises CorruptFrame.
        """
        if not frame.blocks or not 0 < frame.unit <= self._channel.half_bytes:
            raise CorruptFrame(f"blocks of {frame.unit} bytes are no messages of this channel", "unit")
        self._channel.expect(frame, self)
        return 1

    def arrived(self, expected: ExpectedMessage, number: int) -> asyncio.Future[list[int]] | None:
        """Copies each block of message ``number`` to its place, unless the stream has ended.

        Returns a future of the copy if the GPU makes it, None if it is complete.
        """
        if not self.ended and expected.blocks.start == 0:
            expected.places += self.sink.place(expected.frame) or ()
        if self.ended or not expected.places:
            return None
        here = expected.places[expected.blocks.start : expected.blocks.stop]
        try:
            if (copied := self._on_card(expected, number, here)) is not None:
                return copied
            checksums = self._channel.take(number, here, expected.frame.unit)
        except ConfigError as error:
            self._broke(error)
            return None
        self._count(expected, checksums, False)
        return None

    def _on_card(
        self, expected: ExpectedMessage, number: int, here: Sequence[memoryview]
    ) -> asyncio.Future[list[int]] | None:
        """Starts the GPU's copy into our engine's pages there and then the host's; returns None if the blocks'
        places have no GPU pages.
        """
        pages, unit = self._channel.pages, expected.frame.unit
        if pages is None or not pages.takes(unit) or not (to := pages.twins(expected.places)):
            return None
        at, to = self._channel.on_card(number), to[expected.blocks.start : expected.blocks.stop]
        source = [at + index * unit for index in range(len(here))]
        copied = pages.copier.start(to, source, unit, pages.homes(here, to))
        self._copying.append(copied)
        copied.add_done_callback(lambda _: self._copied(expected, copied))
        return copied

    def _copied(self, expected: ExpectedMessage, copied: asyncio.Future[list[int]]) -> None:
        self._copying.remove(copied)
        if self.ended:
            return
        if isinstance(error := copied.exception(), ConfigError):
            self._broke(error)
        else:
            self._count(expected, copied.result(), True)

    def _broke(self, error: ConfigError) -> None:
        """Breaks the stream because the GPU failed, so that its sender looks for another transport."""
        log.error("a handoff by nccl broke: %s", error.message)
        self.abort()

    def _count(self, expected: ExpectedMessage, checksums: list[int], resident: bool) -> None:
        expected.checksums += checksums
        if expected.is_last:
            self.has_landed(expected.frame, expected.checksums, resident)

    def settle(self) -> None:
        """Waits until the GPU's copies of this stream have ended, successfully or not."""
        if self._copying and self._channel.pages is not None:
            self._channel.pages.copier.settle()

    def over(self) -> None:
        """Frees the channel for another stream; called once the last lane is closed."""
        if self._channel.incoming is self:
            self._channel.incoming = None
            self._channel.used = asyncio.get_running_loop().time()


def _ready(sock: socket.socket) -> bool:
    """Lets anyone connect, as tcp does: what is required is a lease's random id."""
    notice_dead_peers(sock)
    return True
