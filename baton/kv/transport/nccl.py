"""Carries KV by torch.distributed's send and recv: NCCL between GPUs, the same code over gloo on CPUs.

Knows nothing of frames' contents; torch is in a process of its own (engine/mover.py). Frames go over a TCP
connection per stream, blocks' bytes over a *channel*: a process group of two, joined once, used by one stream at a
time and kept for the next. Both ends count the messages of a channel, and a stream sends its count in the hello: if
a message was lost with an aborted stream, the receiver refuses, and the sender opens another channel.

torch reads and writes only staging memory. The sender copies a frame's blocks there before ``send`` returns; the
receiver copies them into their places, hashing what it writes. So an ended stream writes nothing more, whatever
NCCL still does, and no collective uses a page. If an engine shares its pages on a GPU, staging memory is on that
GPU, and one kernel launch per message copies between the two (as in cuda_ipc.py); a frame sent that way is one
message, because its checksums are computed over the staged bytes. It has not run on GPUs.

It is not encrypted, and joined through an open port: with TLS on, the network must be declared trusted.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from baton.kv.memory.device_pages import DevicePages
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import tcp
from baton.kv.wire import frames
from baton.kv.wire.base import Accept, HandoffStream, Transport, sealed
from baton.kv.wire.channels import HALF_BYTES, READY, STREAM_ID, StagingChannel, parts
from baton.kv.wire.collective import NcclServer
from baton.kv.wire.frames import RESIDENT, Frame, Kind
from baton.kv.wire.moving import JoinChannel, MoverClient, borrow, give_back
from baton.kv.wire.receiving import SocketServer
from baton.kv.wire.sending import HELLO, MAGIC, VERSION, Lane, SocketStream, SocketTransport
from baton.protos.errors import ConfigError, WorkerLost

IDLE_S = 60.0  # seconds that a channel is kept for the next stream, as by its receiver
CONNECT_S = 5.0  # seconds for the connection, and for the receiver to take the stream


class _IdleChannel(NamedTuple):
    group: bytes
    channel: StagingChannel
    since: float  # by the loop's clock


class NcclTransport(SocketTransport):
    """Implements ``Transport`` to addresses ``host:port/rendezvous port``, with pages of ``memory``.

    Blocks go over channels, torch.distributed groups of two. The mover, the process that calls torch.distributed,
    is ``mover``, or the one that all senders of the event loop share.
    """

    def __init__(self, memory: PageMemory, mover: MoverClient | None = None) -> None:
        super().__init__()
        self._half_bytes = max(HALF_BYTES, -(-memory.page_bytes // 4096) * 4096)
        self._pages = memory.device
        self._mover, self._borrowed = mover or borrow(), mover is None
        self._idle: dict[str, list[_IdleChannel]] = {}
        self._purging: asyncio.TimerHandle | None = None

    async def connect(self, address: str) -> HandoffStream:
        """Returns a new stream, on a channel (torch.distributed group) of an earlier stream or on a new one. Raises
        WorkerLost.
        """
        target, _, meeting = address.rpartition("/")
        if not meeting.isdigit():
            raise WorkerLost(f"{address!r} is not host:port/port", "decode_address")
        self._purge()
        while True:
            kept = self._idle.get(address, [])
            if not kept:
                return await self._open(address, os.urandom(8), None, target, int(meeting))
            group, channel, _ = kept.pop()
            try:
                return await self._open(address, group, channel, target, int(meeting))
            except WorkerLost:  # it lost a message, or another process listens there now: a new channel tells
                channel.leave()
            except BaseException:
                channel.leave()
                raise

    async def close(self) -> None:
        """Closes every stream, and every channel (torch.distributed group)."""
        await super().close()
        if self._purging is not None:
            self._purging.cancel()
        for kept in self._idle.values():
            for idle in kept:
                idle.channel.leave()
        self._idle.clear()
        if self._borrowed:
            self._borrowed = False
            give_back()

    async def _open(
        self, address: str, group: bytes, channel: StagingChannel | None, target: str, meeting: int
    ) -> NcclStream:
        said = STREAM_ID.pack(group, 0 if channel is None else channel.count, os.urandom(4))
        hello = HELLO.pack(MAGIC, VERSION, 0, self._half_bytes >> 12, said)
        sock = await _dial(target, hello)
        lane = Lane(sock, address, self.poller)
        try:
            async with asyncio.timeout(CONNECT_S):
                if await lane.read() != READY:
                    raise lane.lost("it does not take this stream")
            if channel is None:
                host = tcp.split(target)[0]
                join = JoinChannel(f"1-{group.hex()}", group.hex(), 1, host, meeting, sock.getsockname()[0], 0)
                channel = StagingChannel(self._mover, join, self._half_bytes, self._pages)
        except TimeoutError:
            lane.close()
            raise lane.lost("it does not answer") from None
        except BaseException:
            lane.close()
            raise
        return NcclStream(lane, self._streams, channel, lambda: self._left(address, group, channel))

    def _left(self, address: str, group: bytes, channel: StagingChannel) -> None:
        """Keeps a stream's channel unless it broke. It may be out of step; then the receiver refuses the next
        stream.
        """
        if channel.why:
            channel.leave()
        else:
            loop = asyncio.get_running_loop()
            self._idle.setdefault(address, []).append(_IdleChannel(group, channel, loop.time()))
            if self._purging is None:
                self._purging = loop.call_later(IDLE_S, self._purge_later)

    def _purge_later(self) -> None:
        self._purge()
        again = asyncio.get_running_loop().call_later
        self._purging = again(IDLE_S, self._purge_later) if self._idle else None

    def _purge(self) -> None:
        """Leaves channels that broke or that no stream has used for ``IDLE_S``: their receivers may be gone for
        good, and each has staging memory.
        """
        oldest = asyncio.get_running_loop().time() - IDLE_S
        for address, kept in list(self._idle.items()):
            useless = [idle for idle in kept if idle.channel.why or idle.since < oldest]
            for idle in useless:
                kept.remove(idle)
                idle.channel.leave()
            if not kept:
                del self._idle[address]


class NcclStream(SocketStream):
    """Implements ``HandoffStream``: blocks' bytes go over ``channel``, a torch.distributed group of two, everything
    else over TCP.
    """

    def __init__(
        self, lane: Lane, streams: dict[SocketStream, None], channel: StagingChannel, left: Callable[[], None]
    ) -> None:
        super().__init__([lane], streams, elsewhere=True)
        self.channel = channel
        self._lane, self._left, self._closed = lane, left, False
        self._packing: asyncio.Future[list[int]] | None = None
        self._watching = asyncio.ensure_future(self._watch())
        self._order = asyncio.Lock()

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """Sends ``frame``, then its blocks in one or more messages of the channel. Raises WorkerLost."""
        async with self._order:
            if frame.kind not in frames.WITH_BLOCKS or not frame.blocks:
                await super().send(frame, payload)
                return
            offsets, flags = tuple([i * frame.unit for i in range(len(frame.blocks))]), frame.flags & ~RESIDENT
            if frame.unit > self.channel.half_bytes:
                said = f"a block of {frame.unit} bytes doesn't fit messages of {self.channel.half_bytes}"
                raise WorkerLost(said, "kv_transport")
            cut = parts(frame, self.channel.half_bytes)
            pages = self.channel.pages
            on_card = pages is not None and frame.resident and pages.takes(frame.unit)
            if pages is not None and on_card and frame.kind is Kind.BLOCK and len(cut) == 1:
                checksums = await self._pack(frame, pages)
                frame = msgspec.structs.replace(frame, offsets=offsets, flags=flags).seal(checksums)
                await super().send(frame)
                self.channel.move(len(payload) * frame.unit)
                return
            frame = msgspec.structs.replace(sealed(frame, payload), offsets=offsets, flags=flags)
            await super().send(frame)
            for part in cut:
                await self._stage(payload[part.start : part.stop], frame.unit)

    async def receive(self) -> bytes | None:
        """Returns the next encoded reply, or None at the end. Raises WorkerLost; if the channel broke, with its
        reason.
        """
        try:
            return await super().receive()
        except WorkerLost as error:
            raise self._lane.lost(self.channel.why) if self.channel.why else error from None

    async def close(self) -> None:
        """Closes the stream at once; the channel is kept for the next one. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._watching.cancel()
        self.channel.changed.set()
        await super().close()
        if self.channel.pages is not None and self._packing is not None and not self._packing.done():
            self.channel.pages.copier.settle()
        self._left()

    @property
    def resident_bytes(self) -> int:
        """Returns the bytes per frame that the stream best takes from GPU memory; 0 if our engine shares no pages
        there.
        """
        return 0 if self.channel.pages is None else self.channel.half_bytes

    async def _pack(self, frame: Frame, pages: DevicePages) -> list[int]:
        """Has the GPU copy the blocks from the engine's pages to staging; returns their checksums."""
        await self._room()
        at = self.channel.on_card(self.channel.count)
        to = [at + number * frame.unit for number in range(len(frame.blocks))]
        try:
            self._packing = pages.copier.start(to, [pages.at + place for place in frame.offsets], frame.unit)
            return await asyncio.shield(self._packing)
        except ConfigError as error:
            raise self._lane.lost(error.message) from error

    async def _stage(self, payload: Sequence[memoryview], unit: int) -> None:
        """Copies blocks, ``unit`` bytes each, from the host's pages to staging and sends them as a message."""
        await self._room()
        try:
            self.channel.put(payload, unit)
        except ConfigError as error:
            raise self._lane.lost(error.message) from error
        self.channel.move(len(payload) * unit)

    async def _room(self) -> None:
        """Waits until a half of the staging memory is free."""
        channel = self.channel
        while not self._closed and not channel.why and (not channel.joined or channel.count - channel.done > 1):
            channel.changed.clear()
            await channel.changed.wait()
        if self._closed or channel.why:
            raise self._lane.lost(channel.why or "the transport was closed")

    async def _watch(self) -> None:
        """Closes the connection when the channel breaks, also while the stream only waits for replies."""
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
    """Returns the transport for a worker whose pages are in ``memory``."""
    return NcclTransport(memory)


def listen(
    host: str,
    accept: Accept,
    mover: MoverClient | None = None,
    pages: DevicePages | None = None,
    at_once: bool = True,
) -> tuple[SocketServer, str]:
    """Starts a receiving server on the running loop; returns it and its address. Raises ConfigError if a port can't
    be bound.

    The mover, the process that calls torch.distributed, starts now (``at_once``), or with the first sender.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, 0), family=family, backlog=512)
        meeting = socket.create_server((host, 0), family=family, backlog=512)
    except OSError as error:
        raise ConfigError(f"the KV data port can't be bound on {host}: {error.strerror}", "worker.host") from None
    address = f"{host}:{sock.getsockname()[1]}/{meeting.getsockname()[1]}"
    return NcclServer(sock, meeting, host, accept, mover or MoverClient(), pages, at_once), address
