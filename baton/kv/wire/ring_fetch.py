"""Receives streams by cuda_ipc: copies blocks out of each sender's ring in GPU memory.

Knows nothing of what frames mean. If our engine shares its pages on the GPU, one kernel launch copies a frame's
blocks into them and hashes what it stores, and the same bytes are then copied to the host's pages. Otherwise blocks
are copied only to the host's pages and hashed there. Frames are reported in the order in which they came, because
the ring's space is released in that order. An ended stream waits for its copies before it sends END: nothing is
written after.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from baton.kv.memory import copying
from baton.kv.memory.cuda_driver import HANDLE_BYTES, Driver, driver
from baton.kv.memory.device_pages import DevicePages
from baton.kv.wire import frames
from baton.kv.wire.base import Accept
from baton.kv.wire.frames import Frame, Kind
from baton.kv.wire.incoming import IncomingStream
from baton.kv.wire.receiving import SocketServer
from baton.protos.errors import ConfigError, CorruptFrame

log = logging.getLogger("baton.kv")

SHARED = struct.Struct(f"<{HANDLE_BYTES}sQ")  # the ring's handle and size, in a memfd beside the hello
GIVEN_BACK = Kind.END  # subject of the ACK that releases the ring space of the oldest frame with blocks


class CudaIpcServer(SocketServer):
    """Receives streams by cuda_ipc from each sender's ring. ``pages`` are our engine's pages on the GPU, None if it
    shares none.
    """

    def __init__(
        self,
        sock: socket.socket,
        accept: Accept,
        admit: Callable[[socket.socket], bool],
        pages: DevicePages | None = None,
    ) -> None:
        super().__init__(sock, accept, admit)
        self.pages = pages

    def incoming(self, stream_id: bytes, anchor: bool, fds: list[int]) -> IncomingStream:
        """Returns a new stream over the ring whose handle and size are in the one descriptor of ``fds``. Raises
        CorruptFrame.
        """
        if len(fds) != 1:
            raise CorruptFrame("the hello must bring one descriptor, of the ring's handle", "hello")
        said = os.pread(fds[0], SHARED.size, 0)
        if len(said) != SHARED.size:
            raise CorruptFrame("the ring's handle is cut short", "hello")
        handle, size = SHARED.unpack(said)
        return IpcIncomingStream(self._accept, self, stream_id, handle, size, self.pages)


class PendingFetch(msgspec.Struct):
    """A frame whose blocks are being copied: by the GPU (``done``), or still to be copied by the host (None)."""

    frame: Frame
    places: Sequence[memoryview]
    done: asyncio.Future[list[int]] | None


class IpcIncomingStream(IncomingStream):
    """Receives a stream whose blocks are copied out of the sender's ring."""

    def __init__(
        self,
        accept: Accept,
        server: SocketServer,
        stream_id: bytes,
        handle: bytes,
        size: int,
        pages: DevicePages | None = None,
    ) -> None:
        super().__init__(accept, server, stream_id)
        self._cuda, self._size, self._pages = driver(), size, pages
        self._scratch: Scratch | None = None  # for a preflight's blocks
        self._coming: deque[PendingFetch] = deque()
        self._landed_on_card = 0
        try:
            self._ring = self._cuda.open(handle)
        except ConfigError as error:
            raise CorruptFrame(f"the sender's ring can't be opened: {error.message}", "hello") from None

    def fetch(self, frame: Frame) -> int:
        """Copies, or starts to copy, each block to its place, hashes it and releases the ring's space; returns the
        blocks' bytes, at least 1.

        Raises CorruptFrame.
        """
        if frame.offsets and max(frame.offsets) + frame.unit > self._size:
            raise CorruptFrame("a block lies beyond the sender's ring", "offsets")
        places = self.sink.place(frame)
        if places is None:
            return 1
        try:
            self._coming.append(PendingFetch(frame, places, self._started(frame, places)))
        except ConfigError as error:
            self._broke(error)
            return 1
        self._count()
        return max(1, frame.unit * len(places))

    def over(self) -> None:
        """Waits for the GPU's copies and closes the ring; called once the last lane is closed."""
        log.debug("a stream over the card's ring is over: %d blocks landed on the card", self._landed_on_card)
        self.settle()
        self._cuda.close(self._ring)
        if self._scratch is not None:
            self._scratch.close()

    def _started(self, frame: Frame, places: Sequence[memoryview]) -> asyncio.Future[list[int]] | None:
        """Starts the GPU's copy of the blocks; returns None if their places have no pages on the GPU."""
        if self._pages is None or not places or not self._pages.takes(frame.unit):
            return None
        if frame.kind is Kind.PROBE:
            to, home = self._scratched(frame.unit, len(places))
        else:
            to = self._pages.twins(places)
            home = self._pages.homes(places, to) if to else []
        if not to:
            return None
        done = self._pages.copier.start(to, [self._ring + at for at in frame.offsets], frame.unit, home)
        done.add_done_callback(lambda _: self._count())
        return done

    def _scratched(self, unit: int, count: int) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Returns unused places on the GPU and on the host, for ``count`` blocks of ``unit`` bytes."""
        if self._scratch is None or self._scratch.size < unit * count:
            if self._scratch is not None:
                self.settle()
                self._scratch.close()
                self._scratch = None
            self._scratch = Scratch(self._cuda, unit * count)
        begin = self._scratch.at
        return [begin + number * unit for number in range(count)], [(self._scratch.home, begin, unit * count)]

    def _count(self) -> None:
        """Reports the frames whose blocks have been copied, in order."""
        while self._coming and not self.ended:
            first = self._coming[0]
            if first.done is not None and not first.done.done():
                return
            self._coming.popleft()
            try:
                checksums = self._downloaded(first) if first.done is None else first.done.result()
            except ConfigError as error:
                self._broke(error)
                return
            on_card = first.done is not None and first.frame.kind is Kind.BLOCK
            self._landed_on_card += len(checksums) * on_card
            self.has_landed(first.frame, checksums, on_card)
            self.reply(frames.encode(Frame(Kind.ACK, subject=GIVEN_BACK)))

    def _broke(self, error: ConfigError) -> None:
        """Breaks the stream because the GPU failed, so that its sender looks for another transport."""
        log.error("a handoff from the card's ring broke: %s", error.message)
        self.abort()

    def _downloaded(self, fetched: PendingFetch) -> list[int]:
        for place, at in zip(fetched.places, fetched.frame.offsets, strict=True):
            self._cuda.download(place, self._ring + at)
        return copying.checksums(fetched.places)

    def settle(self) -> None:
        """Waits until the GPU's copies of this stream have ended, successfully or not."""
        if self._pages is not None and any(fetched.done is not None for fetched in self._coming):
            self._pages.copier.settle()


class Scratch:
    """Owns ``size`` bytes on the GPU, and as many pinned bytes on the host, for a preflight's blocks."""

    def __init__(self, cuda: Driver, size: int) -> None:
        self.size, self._cuda = size, cuda
        self.at = cuda.allocate(size)
        try:
            self.home = cuda.pinned(size)
        except ConfigError:
            cuda.free(self.at)
            raise

    def close(self) -> None:
        """Frees the memory on the GPU and on the host."""
        self._cuda.free(self.at)
        self._cuda.unpinned(self.home)
