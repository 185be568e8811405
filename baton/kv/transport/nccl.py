"""torch.distributed send and recv between two workers: NCCL between GPUs; the same code over gloo on CPUs.

Knows nothing of frames' contents; torch is in a process of its own (engine/mover.py). Frames go over a TCP
connection per stream, blocks' bytes over a *channel*: a group of two, joined once, used by one stream at a time and
kept for the next. Both ends count the messages of a channel and a stream says its count in the hello: where one was
lost with an aborted stream the receiver refuses, and the sender opens another channel.

torch reads and writes staging memory alone. The sender copies a frame's blocks there before ``send`` returns; the
receiver copies them into their places on its event loop, hashing what it writes. So a stream that was ended writes
nothing more, whatever NCCL still does, and a page is never held by a collective.

Not encrypted, and joined through an open port: with TLS only where the network is declared trusted.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence

import msgspec

from baton.kv import copying
from baton.kv.memory import PageMemory
from baton.kv.transport import frames, tcp
from baton.kv.transport.base import Accept, HandoffStream, Transport, sealed
from baton.kv.transport.channels import READY, STREAM_ID, Channel, parts
from baton.kv.transport.collective import NcclServer
from baton.kv.transport.frames import Frame
from baton.kv.transport.moving import Join, MoverClient, borrow, give_back
from baton.kv.transport.receiving import SocketServer
from baton.kv.transport.sending import HELLO, MAGIC, VERSION, Lane, SocketStream, SocketTransport
from baton.protos.errors import ConfigError, WorkerLost

HALF_BYTES = 8 << 20  # of staging: one message is sent while the next is copied
CONNECT_S = 5.0


class NcclTransport(SocketTransport):
    """Streams to ``host:port/port of the meeting point``, by the mover that all senders share, or by ``mover``."""

    def __init__(self, memory: PageMemory, mover: MoverClient | None = None) -> None:
        super().__init__()
        self._half_bytes = max(HALF_BYTES, -(-memory.page_bytes // 4096) * 4096)
        self._mover, self._borrowed = mover or borrow(), mover is None
        self._idle: dict[str, list[tuple[bytes, Channel]]] = {}

    async def connect(self, address: str) -> HandoffStream:
        """A new stream, on a channel that an earlier one left or on a new one."""
        target, _, meeting = address.rpartition("/")
        if not meeting.isdigit():
            raise WorkerLost(f"{address!r} is not host:port/port", "decode_address")
        while True:
            kept = self._idle.get(address, [])
            if not kept:
                return await self._open(address, os.urandom(8), None, target, int(meeting))
            group, channel = kept.pop()
            if channel.why:
                continue
            try:
                return await self._open(address, group, channel, target, int(meeting))
            except WorkerLost:  # it lost a message, or another process listens there now: a new channel tells
                channel.leave()

    async def close(self) -> None:
        """Close every stream and channel."""
        await super().close()
        for kept in self._idle.values():
            for _, channel in kept:
                channel.leave()
        self._idle.clear()
        if self._borrowed:
            self._borrowed = False
            give_back()

    async def _open(
        self, address: str, group: bytes, channel: Channel | None, target: str, meeting: int
    ) -> NcclStream:
        said = STREAM_ID.pack(group, 0 if channel is None else channel.count, os.urandom(4))
        hello = HELLO.pack(MAGIC, VERSION, 0, self._half_bytes >> 12, said)
        sock = await _dial(target, hello)
        lane = Lane(sock, address, self.poller)
        try:
            async with asyncio.timeout(CONNECT_S):
                if await lane.read() != READY:
                    raise lane.lost("it does not take this stream")
        except TimeoutError:
            lane.close()
            raise lane.lost("it does not answer") from None
        except BaseException:
            lane.close()
            raise
        if channel is None:
            host = tcp.split(target)[0]
            join = Join(f"1-{group.hex()}", group.hex(), 1, host, meeting, sock.getsockname()[0], 0)
            channel = Channel(self._mover, join, self._half_bytes)
        return NcclStream(lane, self._streams, channel, lambda: self._left(address, group, channel))

    def _left(self, address: str, group: bytes, channel: Channel) -> None:
        """What a stream left may be out of step: the receiver knows, and refuses it then."""
        if channel.why:
            channel.leave()
        else:
            self._idle.setdefault(address, []).append((group, channel))


class NcclStream(SocketStream):
    """Blocks' bytes go to the channel's staging memory, everything else over the connection."""

    def __init__(self, lane: Lane, streams: set[SocketStream], channel: Channel, left: Callable[[], None]) -> None:
        super().__init__([lane], streams, elsewhere=True)
        self.channel = channel
        self._lane, self._left, self._closed = lane, left, False
        self._watching = asyncio.ensure_future(self._watch())
        self._order = asyncio.Lock()

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """The frame first: it says what to expect. Its blocks follow, in one message or several."""
        async with self._order:
            if frame.kind not in frames.WITH_BLOCKS or not frame.blocks:
                await super().send(frame, payload)
                return
            offsets = tuple([number * frame.unit for number in range(len(frame.blocks))])
            await super().send(msgspec.structs.replace(sealed(frame, payload), offsets=offsets))
            for part in parts(frame, self.channel.half_bytes):
                await self._stage(payload[part.start : part.stop], frame.unit)

    async def close(self) -> None:
        """At once; the channel is kept."""
        if self._closed:
            return
        self._closed = True
        self._watching.cancel()
        self.channel.changed.set()
        await super().close()
        self._left()

    async def _stage(self, payload: Sequence[memoryview], unit: int) -> None:
        """Copy them out of their pages when the message before the last one has gone."""
        channel = self.channel
        while not self._closed and not channel.why and (not channel.joined or channel.count - channel.done > 1):
            channel.changed.clear()
            await channel.changed.wait()
        if self._closed or channel.why:
            raise self._lane.lost(channel.why or "the transport was closed")
        half = channel.half(channel.count)
        copying.copy([half[i * unit : (i + 1) * unit] for i in range(len(payload))], payload)
        channel.move(len(payload) * unit)

    async def _watch(self) -> None:
        """A broken channel breaks the stream, also while it only waits for replies."""
        while not self.channel.why:
            self.channel.changed.clear()
            await self.channel.changed.wait()
        self._lane.close()


async def _dial(address: str, hello: bytes) -> socket.socket:
    loop, (host, port) = asyncio.get_running_loop(), tcp.split(address)
    try:
        async with asyncio.timeout(CONNECT_S):
            family, kind, proto, _, target = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
            try:
                tcp.notice_dead_peers(sock)
                await loop.sock_connect(sock, target)
                sock.send(hello)
            except BaseException:
                sock.close()
                raise
    except OSError as error:
        raise WorkerLost(f"nobody answers at {address}: {error}", "decode_address") from error
    return sock


def sender(memory: PageMemory) -> Transport:
    """For any worker."""
    return NcclTransport(memory)


def listen(host: str, accept: Accept, mover: MoverClient | None = None) -> tuple[SocketServer, str]:
    """The receiving side, on the running loop, and the address to give out. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, 0), family=family, backlog=512)
        meeting = socket.create_server((host, 0), family=family, backlog=512)
    except OSError as error:
        raise ConfigError(f"the KV data port can't be bound on {host}: {error.strerror}", "worker.host") from None
    address = f"{host}:{sock.getsockname()[1]}/{meeting.getsockname()[1]}"
    return NcclServer(sock, meeting, host, accept, mover or MoverClient()), address
