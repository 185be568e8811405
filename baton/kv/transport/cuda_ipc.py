"""Carries KV between two workers on one GPU, through GPU memory that the sender shares with the receiver.

Knows nothing of frames' contents. Frames travel over a unix socket as in shm.py; blocks' bytes are put into a ring
buffer in GPU memory, one per stream, and the receiver is told the offsets. It copies them into its pages, hashes
the copies and releases the ring's space (wire/ring_fetch.py). Authentication: the socket has mode 0600 and the
kernel names the peer's user; the address names the receiver's GPU, and a sender on another one refuses before it
connects.

If an engine shares its pages on the GPU (kv/memory/device_pages.py), blocks are copied from and to those, by one
kernel launch per frame that also hashes what it stores, on another CUDA stream than the engine's. A sender reads
blocks there that its engine reported as resident; a receiver updates the host's pages afterwards. Each end does so
independently, with the same frames; ``auto`` prefers this transport if both do. It has not run on a GPU.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence

import msgspec

from baton.kv.memory import copying
from baton.kv.memory.cuda_driver import driver
from baton.kv.memory.device_pages import DevicePages
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import shm
from baton.kv.wire import frames
from baton.kv.wire.base import Accept, HandoffStream, Transport
from baton.kv.wire.frames import RESIDENT, Frame, Kind
from baton.kv.wire.receiving import SocketServer
from baton.kv.wire.ring import Ring
from baton.kv.wire.ring_fetch import GIVEN_BACK, SHARED, CudaIpcServer
from baton.kv.wire.sending import Lane, SocketStream, SocketTransport, hello
from baton.protos.errors import ConfigError, CorruptFrame, WorkerLost

RING_BYTES = 32 << 20  # bytes of a stream's ring in GPU memory
# Bytes of a frame from GPU memory: a block is hashed by one multiprocessor, so a frame should have many blocks.
FRAME_BYTES = 8 << 20


class CudaIpcTransport(SocketTransport):
    """Opens streams to addresses ``socket path#GPU id``.

    ``pages`` are our engine's pages on the GPU if it shares them; ``ring_bytes`` is the size of each stream's ring.
    """

    def __init__(self, ring_bytes: int = RING_BYTES, pages: DevicePages | None = None) -> None:
        super().__init__()
        self._cuda, self._ring_bytes, self._pages = driver(), ring_bytes, pages
        self._idle: list[Ring] = []

    async def connect(self, address: str) -> HandoffStream:
        """Returns a new stream with its own ring. Raises WorkerLost if the receiver is on another GPU or doesn't
        answer.
        """
        path, _, card = address.rpartition("#")
        if card != self._cuda.card:
            raise WorkerLost(
                f"cuda_ipc needs both workers on one card: ours is {self._cuda.card}, the receiver's {card}",
                "decode_address",
            )
        ring = self._idle.pop() if self._idle else Ring(self._cuda, self._ring_bytes)
        try:
            lane = Lane(_dial(path, ring), path, self.poller)
        except BaseException:
            self._idle.append(ring)
            raise
        return IpcStream(lane, ring, self._streams, self._pages, self._left)

    async def close(self) -> None:
        """Closes every stream and frees the rings."""
        await super().close()
        while self._idle:
            self._idle.pop().close()

    def _left(self, ring: Ring) -> None:
        """Keeps a ring for the next stream, because a free waits for the whole GPU, and receivers may still use the
        ring.
        """
        ring.taken.clear()
        if self._poller is None:  # the transport was closed meanwhile
            ring.close()
        else:
            self._idle.append(ring)


class IpcStream(SocketStream):
    """Implements ``HandoffStream`` with blocks that go through ``ring``.

    Replies are read as soon as they come, because some release space in the ring.
    """

    def __init__(
        self,
        lane: Lane,
        ring: Ring,
        streams: dict[SocketStream, None],
        pages: DevicePages | None,
        left: Callable[[Ring], None],
    ) -> None:
        super().__init__([lane], streams, elsewhere=True)
        self._ring, self._lane, self._pages, self._left = ring, lane, pages, left
        self._room = asyncio.Event()
        self._replies: asyncio.Queue[bytes | WorkerLost | CorruptFrame | None] = asyncio.Queue()
        self._over = False
        self._order = asyncio.Lock()  # room is taken in the order in which frames leave
        self._packing: asyncio.Future[list[int]] | None = None
        self._probes: dict[tuple[int, int], int] = {}  # a preflight's blocks, of the host's memory, on the card
        self._reading = asyncio.ensure_future(self._read())

    @property
    def resident_bytes(self) -> int:
        """Returns the bytes per frame that the stream best takes from GPU memory; 0 if our engine shares no pages
        there.
        """
        return 0 if self._pages is None else min(FRAME_BYTES, self._ring.size // 4)

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """Sends ``frame``; its blocks wait for space in the ring. Raises WorkerLost."""
        async with self._order:
            if frame.kind in frames.WITH_BLOCKS:
                begin = await self._taken(sum(map(len, payload)))
                frame = await self._filled(frame, payload, begin)
            await super().send(frame, payload)

    async def receive(self) -> bytes | None:
        """Returns the next encoded reply that isn't about the ring, or None at the end. Raises WorkerLost and
        CorruptFrame.
        """
        reply = await self._replies.get()
        if not isinstance(reply, bytes):
            self._replies.put_nowait(reply)  # the end stays the end
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def close(self) -> None:
        """Closes the stream and gives its ring back to the transport; senders that wait for space in it get
        WorkerLost.
        """
        if self in self._streams:
            try:
                await super().close()
                await self._reading
            finally:
                if self._pages is not None and self._packing is not None and not self._packing.done():
                    self._pages.copier.settle()
                for at in self._probes.values():
                    self._ring.cuda.free(at)
                self._left(self._ring)

    async def _filled(self, frame: Frame, payload: Sequence[memoryview], begin: int) -> Frame:
        """Returns ``frame`` with the offsets of its blocks in the ring, after copying them there; from GPU pages,
        also with checksums.
        """
        flags = frame.flags & ~RESIDENT
        try:
            if self._pages is None or not frame.resident or not payload or not self._pages.takes(frame.unit):
                return msgspec.structs.replace(frame, flags=flags, offsets=self._ring.fill(begin, payload))
            places = tuple(range(begin, begin + len(payload) * frame.unit, frame.unit))
            to = [self._ring.at + at for at in places]
            self._packing = self._pages.copier.start(to, self._sources(frame, payload, self._pages), frame.unit)
            checksums = await asyncio.shield(self._packing)
        except ConfigError as error:
            raise self._lane.lost(error.message) from error
        return msgspec.structs.replace(frame, flags=flags, offsets=places).seal(checksums)

    def _sources(self, frame: Frame, payload: Sequence[memoryview], pages: DevicePages) -> list[int]:
        """Returns the GPU addresses of the blocks: in the engine's pages there, or, of a preflight's blocks, in
        memory of ours.
        """
        if frame.kind is Kind.PROBE:
            return [self._probe(view) for view in payload]
        return [pages.at + at for at in frame.offsets]

    def _probe(self, view: memoryview) -> int:
        known = copying.address(view), len(view)
        if known not in self._probes:
            self._probes[known] = self._ring.cuda.allocate(len(view))
            self._ring.cuda.upload(self._probes[known], view)
            self._ring.cuda.wait()
        return self._probes[known]

    async def _read(self) -> None:
        end: WorkerLost | CorruptFrame | None = None
        try:
            while (raw := await super().receive()) is not None:
                frame = frames.decode(raw)
                if frame.kind is Kind.ACK and frame.subject == GIVEN_BACK:
                    self._given_back()
                else:
                    self._replies.put_nowait(raw)
        except (WorkerLost, CorruptFrame) as error:
            end = error
        self._over = True
        self._room.set()
        self._replies.put_nowait(end)

    def _given_back(self) -> None:
        if not self._ring.taken:
            raise CorruptFrame("the receiver gave back what it didn't have", "subject")
        self._ring.taken.popleft()
        self._room.set()

    async def _taken(self, size: int) -> int:
        if size > self._ring.size:
            raise WorkerLost(f"a frame of {size} bytes doesn't fit a ring of {self._ring.size}", "kv_transport")
        while not self._over:  # else the ring may be another stream's
            if (begin := self._ring.take(size)) is not None:
                return begin
            self._room.clear()
            await self._room.wait()
        raise self._lane.lost("it is over")


def sender(memory: PageMemory) -> Transport:
    """Returns the transport for a worker on a GPU. Raises ConfigError if there is none."""
    return CudaIpcTransport(max(RING_BYTES, memory.page_bytes), memory.device)


def listen(path: str, accept: Accept, pages: DevicePages | None = None) -> tuple[SocketServer, str]:
    """Starts a receiving server on the running loop at socket ``path``; returns it and its address. Raises
    ConfigError if there is no GPU or the socket can't be made.
    """
    card = driver().card
    return CudaIpcServer(shm.bind(path), accept, shm.same_user, pages), f"{path}#{card}"


def _dial(path: str, ring: Ring) -> socket.socket:
    sock, shown = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK), os.memfd_create("ring")
    try:
        os.write(shown, SHARED.pack(ring.handle, ring.size))
        sock.connect(path)
        if not shm.same_user(sock):
            raise PermissionError("another user listens there")
        socket.send_fds(sock, [hello(0, os.urandom(16))], [shown])
    except OSError as error:
        sock.close()
        raise WorkerLost(f"nobody answers at {path}: {error}", "decode_address") from error
    finally:
        os.close(shown)
    return sock
