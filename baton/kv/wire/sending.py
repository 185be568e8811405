"""Sends streams over sockets (tcp, shm): frames over one or more lanes (connections), replies on the first.

Knows nothing of addresses or of what frames mean. Blocks' bytes go from their memory to the kernel without another
copy. All I/O runs on the event loop without blocking it: once ``close`` has returned, no byte is read.

A connection begins with a hello, which names the newest version of the frames that the sender knows. In version 1
that field is zero and not read. A receiver that knows more than version 1 first answers with a GREETING; others
don't, and a sender that has received no greeting writes version 1.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

from baton.kv.memory import copying
from baton.kv.memory.block_sums import Bytes
from baton.kv.wire import frames
from baton.kv.wire.base import sealed
from baton.kv.wire.frames import HEADER_BYTES, Frame, Kind
from baton.kv.wire.poller import Poller
from baton.protos.errors import CorruptFrame, WorkerLost

T = TypeVar("T")

MAGIC = b"BKVH"
HELLO = struct.Struct("<4sBBH16s")  # magic, version, lane, newest, stream id: the first bytes of each connection
VERSION = 1  # the hello's version, and the frames' until both ends are known to read a newer one
KEPT_BACK_BYTES = 64 << 10  # last bytes of a frame, held back until it is hashed and sent with its checksums
ANCHOR = 255  # number of a lane without frames: while it is open the receiver keeps our pages mapped
MAX_VECTORS = 512  # buffers of one gather write
READ_BYTES = 64 << 10  # bytes asked for in one read of replies


class Lane:
    """Reads and writes one connected, non-blocking socket; ``name`` identifies the peer in errors."""

    def __init__(self, sock: socket.socket, name: str, poller: Poller) -> None:
        self._sock = sock
        self._poller = poller
        self._fd = sock.fileno()
        self._name = name
        self._waits: dict[bool, asyncio.Future[None]] = {}
        self._closed = False

    async def write(self, buffers: Sequence[Bytes]) -> None:
        """Writes all of ``buffers``, in order. Raises WorkerLost."""
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            sent = await self._try(lambda: self._sock.sendmsg(left[:MAX_VECTORS]), True)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    async def read(self) -> bytes:
        """Returns at least one received byte, or nothing at the end. Raises WorkerLost."""
        return await self._try(lambda: self._sock.recv(READ_BYTES), False)

    def close(self) -> None:
        """Closes the socket at once; coroutines that wait for it get WorkerLost."""
        if self._closed:
            return
        self._closed = True
        self._poller.forget(self._fd)
        for waiting in self._waits.values():
            if not waiting.done():
                waiting.set_exception(self.lost("the transport was closed"))
        self._sock.close()

    def lost(self, why: object) -> WorkerLost:
        """Returns a WorkerLost error that names this lane's peer and says ``why`` the stream broke."""
        return WorkerLost(f"the handoff stream to {self._name} broke: {why}", "decode_address")

    async def _try(self, act: Callable[[], T], write: bool) -> T:
        while not self._closed:
            try:
                return act()
            except BlockingIOError:
                await self._ready(write)
            except OSError as error:
                raise self.lost(error.strerror) from error
        raise self.lost("it was closed")

    async def _ready(self, write: bool) -> None:
        self._waits[write] = waiting = asyncio.get_running_loop().create_future()
        watch = self._poller.writes if write else self._poller.reads
        watch(self._fd, lambda: wake(waiting))
        try:
            await waiting
        finally:
            if not self._closed:
                watch(self._fd, None)


class SocketTransport:
    """Keeps the open streams of a socket transport, and their poller."""

    def __init__(self) -> None:
        self._streams: dict[SocketStream, None] = {}  # in the order in which they were opened
        self._poller: Poller | None = None

    @property
    def poller(self) -> Poller:
        """Returns the poller of the running loop, made on first use."""
        self._poller = self._poller or Poller()
        return self._poller

    async def close(self) -> None:
        """Closes every stream and the poller."""
        for stream in tuple(self._streams):
            await stream.close()
        if self._poller is not None:
            self._poller.close()
            self._poller = None


class SocketStream:
    """Implements ``HandoffStream`` over ``lanes``; replies come on the first.

    With ``elsewhere`` only the blocks' offsets are sent, not their bytes. The stream is in ``streams`` until it
    closes. If the receiver reads trailers, blocks are hashed while the kernel sends them.
    """

    def __init__(self, lanes: Sequence[Lane], streams: dict[SocketStream, None], elsewhere: bool = False) -> None:
        self._lanes = list(lanes)
        self._streams, self._elsewhere = streams, elsewhere
        streams[self] = None
        self._writing: dict[Lane, asyncio.Task[None]] = {}
        self._sent = self._said = 0  # frames with blocks, and without
        self._greeted = 1  # the version that the receiver reads, as far as is known
        self._inbox = bytearray()
        self._ended = False
        self._turn = asyncio.Lock()

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """Sends a frame: one with blocks on the first free lane, others on the first lane; the receiver restores
        their order. Raises WorkerLost.
        """
        async with self._turn:
            with_blocks = frame.kind in frames.WITH_BLOCKS
            lane = await self._free_lane() if with_blocks else self._lanes[0]
            head, payload = self._encode(frame, payload)
            write = _write_hashing if payload and not frame.sealed and self._trails else _write
            self._sent += with_blocks
            self._said += not with_blocks
            if len(self._lanes) == 1:
                await write(lane, head, payload)
                return
            if (earlier := self._writing.get(lane)) is not None:
                await earlier
            self._writing[lane] = asyncio.ensure_future(write(lane, head, payload))
            if not with_blocks:
                await self._writing[lane]

    async def receive(self) -> bytes | None:
        """Returns the next encoded reply, or None after END. Raises WorkerLost and CorruptFrame."""
        while not self._ended:
            if (reply := self._next()) is not None:
                said = frames.decode(reply)
                if said.kind is Kind.GREETING:
                    self._greeted = said.subject
                    continue
                if said.kind is not Kind.END:
                    return reply
                self._ended = True
                break
            data = await self._lanes[0].read()
            if not data:
                raise self._lanes[0].lost("it ended without a goodbye")
            self._inbox += data
        return None

    async def close(self) -> None:
        """Closes every lane of the stream. Writes in progress end with WorkerLost; no task is cancelled."""
        self._streams.pop(self, None)
        for lane in self._lanes:
            lane.close()
        await asyncio.gather(*self._writing.values(), return_exceptions=True)
        self._writing.clear()

    @property
    def _trails(self) -> bool:
        """Returns whether checksums may follow the blocks' bytes."""
        return self._greeted >= frames.TRAILING_SINCE and not self._elsewhere

    def _encode(self, frame: Frame, payload: Sequence[memoryview]) -> tuple[bytes, Sequence[memoryview]]:
        """Returns header and body, and the blocks' bytes that have to follow."""
        flags = frame.flags
        if self._trails and not frame.sealed:
            flags |= frames.TRAILING
        else:
            frame = sealed(frame, payload)
        if self._elsewhere and frame.offsets:
            flags, payload = flags | frames.ELSEWHERE, ()
        subject = min(self._said, frames.MOST_COUNTED) if frame.kind in frames.WITH_BLOCKS else frame.subject
        numbered = Frame(
            frame.kind, frame.lease, frame.epoch, frame.body, frame.shard_rank, frame.shard_count, flags,
            subject, self._sent, frame.unit, frame.blocks, frame.offsets,
        )  # fmt: skip
        return frames.encode(numbered), payload

    async def _free_lane(self) -> Lane:
        if len(self._lanes) == 1:
            return self._lanes[0]
        while True:
            for lane in self._lanes:
                task = self._writing.get(lane)
                if task is None:
                    return lane
                if task.done():
                    del self._writing[lane]
                    task.result()
                    return lane
            await asyncio.wait(self._writing.values(), return_when=asyncio.FIRST_COMPLETED)

    def _next(self) -> bytes | None:
        if len(self._inbox) < HEADER_BYTES:
            return None
        size = HEADER_BYTES + frames.body_bytes(self._inbox)
        if len(self._inbox) < size:
            return None
        reply = bytes(self._inbox[:size])
        del self._inbox[:size]
        if frames.decode(reply).kind in frames.WITH_BLOCKS:
            raise CorruptFrame("a receiver sends no blocks", "kind")
        return reply


async def _write(lane: Lane, head: bytes, payload: Sequence[memoryview]) -> None:
    await lane.write([head, *payload])


async def _write_hashing(lane: Lane, head: bytes, payload: Sequence[memoryview]) -> None:
    """Hashes the blocks after the kernel has taken them, while it sends and the CPU's cache still holds them."""
    *whole, last = payload
    cut = max(0, len(last) - KEPT_BACK_BYTES)
    await lane.write([head, *whole, last[:cut]])
    await lane.write([last[cut:], frames.trailer(copying.checksums(payload))])


def hello(lane: int, stream: bytes, newest: int = 0) -> bytes:
    """Returns the hello, the first bytes of a connection: lane number, 16-byte stream id and the newest frame
    version.

    ``newest`` 0 asks for no greeting.
    """
    return HELLO.pack(MAGIC, VERSION, lane, newest, stream)


def wake(waiting: asyncio.Future[None]) -> None:
    """Completes the future ``waiting``, unless it is done."""
    if not waiting.done():
        waiting.set_result(None)
