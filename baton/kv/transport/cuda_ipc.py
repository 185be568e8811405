"""Two workers on one card: blocks go through memory of the card that the sender shares with the receiver.

Knows nothing of frames' contents. Frames travel over a unix socket as in shm.py; blocks' bytes are put into a ring
of the card's memory, of which each stream has its own, and the receiver is told where. It copies them out into its
pages, hashes what lies there and gives the room back. Who may talk: the socket has mode 0600 and the kernel names
the peer's user; the address names the receiver's card, and a sender on another one refuses before it connects.

Not measured on a GPU yet. While workers keep their pages in host memory it can't beat shm: ``auto`` never takes it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

import msgspec

from baton.kv import copying
from baton.kv.cuda_driver import HANDLE_BYTES, Driver, driver
from baton.kv.memory import PageMemory
from baton.kv.transport import frames, shm
from baton.kv.transport.base import Accept, HandoffStream, Transport
from baton.kv.transport.frames import Frame, Kind
from baton.kv.transport.receiving import Session, SocketServer
from baton.kv.transport.sending import Lane, SocketStream, SocketTransport, hello
from baton.protos.errors import ConfigError, CorruptFrame, WorkerLost

RING_BYTES = 32 << 20
_SHARED = struct.Struct(f"<{HANDLE_BYTES}sQ")  # beside the hello, in a memfd: the ring's handle and size
GIVEN_BACK = Kind.END  # subject of the ACK that says so: the room of the oldest frame with blocks


class CudaIpcTransport(SocketTransport):
    """Streams to ``path#card``."""

    def __init__(self, ring_bytes: int = RING_BYTES) -> None:
        super().__init__()
        self._cuda, self._ring_bytes = driver(), ring_bytes

    async def connect(self, address: str) -> HandoffStream:
        """A new stream, with a ring of its own."""
        path, _, card = address.rpartition("#")
        if card != self._cuda.card:
            raise WorkerLost(
                f"cuda_ipc needs both workers on one card: ours is {self._cuda.card}, the receiver's {card}",
                "decode_address",
            )
        ring = Ring(self._cuda, self._ring_bytes)
        try:
            lane = Lane(_dial(path, ring), path, self.poller)
        except BaseException:
            ring.close()
            raise
        return IpcStream(lane, ring, self._streams)


class Ring:
    """Memory of the card that frames' blocks take in turn. ``taken`` holds (begin, end) of those not given back."""

    def __init__(self, cuda: Driver, size: int) -> None:
        self.size, self.taken = size, deque[tuple[int, int]]()
        self._cuda, self._at = cuda, cuda.allocate(size)
        self.handle = cuda.share(self._at)

    def take(self, size: int) -> int | None:
        """``size`` bytes in a row; None while there are none."""
        begin = self._room(size)
        if begin is not None:
            self.taken.append((begin, begin + size))
        return begin

    def fill(self, begin: int, payload: Sequence[memoryview]) -> tuple[int, ...]:
        """Blocks' bytes from ``begin`` on; where each lies."""
        places = []
        for view in payload:
            self._cuda.upload(self._at + begin, view)
            places.append(begin)
            begin += len(view)
        self._cuda.wait()
        return tuple(places)

    def close(self) -> None:
        """The receiver's own mapping, if any, keeps the card's memory until it closes it."""
        self._cuda.free(self._at)

    def _room(self, size: int) -> int | None:
        if not self.taken:
            return 0 if size <= self.size else None
        oldest, newest = self.taken[0][0], self.taken[-1][1]
        if newest <= oldest:  # the newest lie before the oldest
            return newest if newest + size <= oldest else None
        if newest + size <= self.size:
            return newest
        return 0 if size <= oldest else None


class IpcStream(SocketStream):
    """A stream whose blocks go through ``ring``. What comes back is read as it comes, for room is among it."""

    def __init__(self, lane: Lane, ring: Ring, streams: set[SocketStream]) -> None:
        super().__init__([lane], streams, elsewhere=True)
        self._ring, self._lane = ring, lane
        self._room = asyncio.Event()
        self._replies: asyncio.Queue[bytes | WorkerLost | CorruptFrame | None] = asyncio.Queue()
        self._over = False
        self._reading = asyncio.ensure_future(self._read())

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """Blocks wait for room in the ring."""
        if frame.kind in frames.WITH_BLOCKS:
            begin = await self._taken(sum(map(len, payload)))
            frame = msgspec.structs.replace(frame, offsets=self._ring.fill(begin, payload))
        await super().send(frame, payload)

    async def receive(self) -> bytes | None:
        """The next reply that isn't about the ring."""
        reply = await self._replies.get()
        if not isinstance(reply, bytes):
            self._replies.put_nowait(reply)  # the end stays the end
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def close(self) -> None:
        """Also gives the ring back; whoever waits for room in it hears that the stream is over."""
        if self in self._streams:
            await super().close()
            await self._reading
            self._ring.close()

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
        while (begin := self._ring.take(size)) is None:
            if self._over:
                raise self._lane.lost("it is over")
            self._room.clear()
            await self._room.wait()
        return begin


class CudaIpcServer(SocketServer):
    """Opens each sender's ring."""

    def session(self, stream: bytes, anchor: bool, fds: list[int]) -> Session:
        """A sender is here with its ring."""
        if len(fds) != 1:
            raise CorruptFrame("the hello must bring one descriptor, of the ring's handle", "hello")
        said = os.pread(fds[0], _SHARED.size, 0)
        if len(said) != _SHARED.size:
            raise CorruptFrame("the ring's handle is cut short", "hello")
        handle, size = _SHARED.unpack(said)
        return IpcSession(self._accept, self, stream, handle, size)


class IpcSession(Session):
    """A stream whose blocks are fetched from the sender's ring."""

    def __init__(self, accept: Accept, server: SocketServer, stream: bytes, handle: bytes, size: int) -> None:
        super().__init__(accept, server, stream)
        self._cuda, self._size = driver(), size
        try:
            self._ring = self._cuda.open(handle)
        except ConfigError as error:
            raise CorruptFrame(f"the sender's ring can't be opened: {error.message}", "hello") from None

    def fetch(self, frame: Frame) -> int:
        """Copy each block into its place, hash it there, and give the room back."""
        if frame.offsets and max(frame.offsets) + frame.unit > self._size:
            raise CorruptFrame("a block lies beyond the sender's ring", "offsets")
        places = self.sink.place(frame)
        if places is None:
            return 1
        for place, at in zip(places, frame.offsets, strict=True):
            self._cuda.download(place, self._ring + at)
        self.has_landed(frame, copying.checksums(places))
        self.reply(frames.encode(Frame(Kind.ACK, subject=GIVEN_BACK)))
        return max(1, frame.unit * len(places))

    def over(self) -> None:
        """No lane is left."""
        self._cuda.close(self._ring)


def sender(memory: PageMemory) -> Transport:
    """For a worker on a card. Raises ConfigError where there is none."""
    return CudaIpcTransport()


def listen(path: str, accept: Accept) -> tuple[SocketServer, str]:
    """The receiving side, on the running loop, at ``path``. Raises ConfigError, also where there is no card."""
    card = driver().card
    return CudaIpcServer(shm.bind(path), accept, shm.same_user), f"{path}#{card}"


def _dial(path: str, ring: Ring) -> socket.socket:
    sock, shown = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK), os.memfd_create("ring")
    try:
        os.write(shown, _SHARED.pack(ring.handle, ring.size))
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
