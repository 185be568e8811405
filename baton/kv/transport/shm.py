"""Carries KV within a host: the receiver maps the sender's pages and copies blocks once, hashing while it copies.

Knows nothing of frames' contents. Frames travel over a unix socket, blocks' bytes don't: the sender passes a
*read-only* descriptor of its page memory with its hello, the receiver maps it and is told offsets. Neither writes
the other's memory: only a decode worker itself writes its pages. A sender that frees a page too early can at worst
make the checksum wrong, because what is hashed is the receiver's copy.

Authentication: the socket has mode 0600, and each end asks the kernel (SO_PEERCRED) whether the peer is the same
user. A memory that could shrink under the mapping (SIGBUS) is refused: it must be a memfd sealed against it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
from pathlib import Path

from baton.kv.memory import copying
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire.base import Accept, HandoffStream, Transport
from baton.kv.wire.frames import Frame
from baton.kv.wire.incoming import IncomingStream
from baton.kv.wire.receiving import SocketServer
from baton.kv.wire.sending import ANCHOR, Lane, SocketStream, SocketTransport, hello
from baton.protos.errors import ConfigError, CorruptFrame, WorkerLost

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
MAX_PATH = 107  # bytes of a unix socket's path that Linux takes
# Bytes of the send buffer, small so that few blocks wait to be copied and the CPU's cache still holds them.
QUEUED_BYTES = 8 << 10


class ShmTransport(SocketTransport):
    """Implements ``Transport`` to unix sockets of this host; ``memory`` holds the pages that will be sent."""

    def __init__(self, memory: PageMemory) -> None:
        super().__init__()
        self._fd = _read_only(memory.fd)
        self._anchors: dict[str, socket.socket] = {}

    async def connect(self, address: str) -> HandoffStream:
        """Returns a new stream to the socket at path ``address``. Raises WorkerLost."""
        self._anchor(address)
        lane = Lane(self._dial(address, 0), address, self.poller)
        return SocketStream([lane], self._streams, elsewhere=True)

    async def close(self) -> None:
        """Closes every stream; receivers unmap our pages."""
        await super().close()
        for anchor in self._anchors.values():
            anchor.close()
        self._anchors.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _anchor(self, address: str) -> None:
        """Keeps one idle connection to each receiver, so that our pages stay mapped there, page tables included."""
        anchor = self._anchors.get(address)
        if anchor is not None and _is_open(anchor):
            return
        for gone in [at for at, kept in self._anchors.items() if not _is_open(kept)]:
            self._anchors.pop(gone).close()
        self._anchors[address] = self._dial(address, ANCHOR)

    def _dial(self, address: str, lane: int) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUED_BYTES)
        try:
            sock.connect(address)
            if not same_user(sock):
                raise PermissionError("another user listens there")
            socket.send_fds(sock, [hello(lane, os.urandom(16))], [self._fd])
        except OSError as error:
            sock.close()
            raise WorkerLost(f"nobody answers at {address}: {error}", "decode_address") from error
        return sock


def sender(memory: PageMemory) -> Transport:
    """Returns the transport for a worker whose pages are in ``memory``."""
    return ShmTransport(memory)


def listen(path: str, accept: Accept) -> tuple[SocketServer, str]:
    """Starts a receiving server on the running loop at socket ``path``; returns it and ``path``. Raises
    ConfigError.

    A socket file that is there already is replaced.
    """
    return ShmServer(bind(path), accept), path


def bind(path: str) -> socket.socket:
    """Returns a listening socket at ``path`` that only our user can reach; replaces a file there. Raises
    ConfigError.
    """
    if len(path) > MAX_PATH:
        raise ConfigError(f"{path} is too long for a unix socket; choose a shorter cluster.run_dir", "run_dir")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        Path(path).unlink(missing_ok=True)
        sock.bind(path)
        os.chmod(path, 0o600)  # before listen: until then nobody can connect
        sock.listen(512)
    except OSError as error:
        sock.close()
        raise ConfigError(f"the KV socket {path} can't be made: {error.strerror}", "run_dir") from None
    return sock


class ShmServer(SocketServer):
    """Receives streams by shm; ``mappings`` has the mapped memory of each sender, by device and inode."""

    def __init__(self, sock: socket.socket, accept: Accept) -> None:
        super().__init__(sock, accept, same_user)
        self.mappings: dict[tuple[int, int], MappedMemory] = {}

    def incoming(self, stream_id: bytes, anchor: bool, fds: list[int]) -> IncomingStream:
        """Returns a new stream whose blocks lie in the sender's memory, the one descriptor in ``fds``. Raises
        CorruptFrame.
        """
        if len(fds) != 1:
            raise CorruptFrame("the hello must bring one descriptor, of the sender's pages", "hello")
        return ShmIncomingStream(self._accept, self, stream_id, _map(self.mappings, fds[0]))


class ShmIncomingStream(IncomingStream):
    """Receives a stream whose blocks are copied from the sender's mapped memory."""

    def __init__(self, accept: Accept, server: SocketServer, stream_id: bytes, mapping: MappedMemory) -> None:
        super().__init__(accept, server, stream_id)
        self._mapping = mapping

    def fetch(self, frame: Frame) -> int:
        """Copies the blocks of ``frame`` to their places, hashing them, and returns how many bytes that were, at
        least 1. Raises CorruptFrame.
        """
        unit = frame.unit
        if frame.offsets and max(frame.offsets) + unit > len(self._mapping.view):
            raise CorruptFrame("a block lies beyond the sender's memory", "offsets")
        places = self.sink.place(frame)
        if places is None:
            return 1
        self.has_landed(frame, copying.copy_from(places, [self._mapping.address + at for at in frame.offsets]))
        return max(1, unit * len(places))

    def over(self) -> None:
        """Releases the sender's mapped memory; called once the last connection of the stream is closed."""
        self._mapping.leave()


class MappedMemory:
    """Maps a sender's memory, a sealed memfd ``fd``, read-only while a stream uses it; it is an entry of ``known``
    meanwhile.

    Raises CorruptFrame if the memory could shrink.
    """

    def __init__(self, fd: int, known: dict[tuple[int, int], MappedMemory]) -> None:
        status = os.fstat(fd)
        _check_sealed(fd)
        self._key = (status.st_dev, status.st_ino)
        self._known = known
        self._users = 0
        self._map = mmap.mmap(fd, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.address = copying.address(self.view)
        known[self._key] = self

    def enter(self) -> MappedMemory:
        """Counts one user more and returns the mapping."""
        self._users += 1
        return self

    def leave(self) -> None:
        """Counts one user less; with the last the memory is unmapped."""
        self._users -= 1
        if not self._users:
            del self._known[self._key]
            self.view.release()
            self._map.close()


def same_user(sock: socket.socket) -> bool:
    """Returns whether the process at the other end of unix socket ``sock`` runs as our user."""
    said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(said)[1] == os.geteuid())


def _read_only(fd: int) -> int:
    """Returns a new, read-only descriptor of the same memory."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WorkerLost(f"our pages can't be shown read-only ({error}); is /proc mounted?", "shm") from None


def _map(known: dict[tuple[int, int], MappedMemory], fd: int) -> MappedMemory:
    status = os.fstat(fd)
    mapping = known.get((status.st_dev, status.st_ino))
    return (MappedMemory(fd, known) if mapping is None else mapping).enter()


def _check_sealed(fd: int) -> None:
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        sealed = 0
    if not sealed:
        raise CorruptFrame("the sender's memory is not a memfd that is sealed against shrinking", "hello")


def _is_open(sock: socket.socket) -> bool:
    """Returns whether the peer still has its end open; nothing is ever sent on this socket."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False
