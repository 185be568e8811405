"""The local channel between a worker's two processes: length-prefixed msgpack over one unix socket, and one fd.

Knows nothing of what the messages mean (``baton/protos/channel/`` does) and never blocks a sender: what the
socket doesn't take at once waits in a buffer. A frame is a u32 little-endian length and that many bytes; a frame
of length 0 carries no message, only a file descriptor beside it (SCM_RIGHTS).
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import msgspec

from baton.protos.channel import ToEngine, ToIo

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18  # bytes of one read, which hold the messages of several steps
_MAX_FDS = 4  # descriptors that one read may bring, because each is sent by itself

M = TypeVar("M")


class _Inbound(Generic[M]):
    """Decodes received bytes to messages."""

    def __init__(self, decode: Callable[[bytes | memoryview], M]) -> None:
        self._decode = decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that ``data`` completes, in order."""
        self._buffer += data
        messages, at = [], 0
        with memoryview(self._buffer) as view:
            while len(view) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, at)
                end = at + _LENGTH.size + length
                if end > len(view):
                    break
                if length:
                    messages.append(self._decode(view[at + _LENGTH.size : end]))
                at = end
        del self._buffer[:at]
        return messages


class _Outbound:
    """Messages in, bytes to a non-blocking socket as it takes them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self.gone = False

    @property
    def pending(self) -> int:
        """Bytes that the socket hasn't taken yet."""
        return len(self._buffer)

    def put(self, message: msgspec.Struct) -> None:
        """Queue ``message`` and write what can be written now. Dropped once the peer is gone."""
        if self.gone:
            return
        at = len(self._buffer)
        self._buffer += bytes(_LENGTH.size)
        self._encoder.encode_into(message, self._buffer, at + _LENGTH.size)
        _LENGTH.pack_into(self._buffer, at, len(self._buffer) - at - _LENGTH.size)
        if at == 0:
            self.write()

    def write(self) -> None:
        """Hand the socket what it takes without blocking."""
        taken = 0
        try:
            with memoryview(self._buffer) as view:
                while taken < len(view):
                    taken += self._sock.send(view[taken:])
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # the reader learns of it as end of stream
            self.gone, taken = True, len(self._buffer)
        del self._buffer[:taken]


def send_fd(sock: socket.socket, fd: int) -> None:
    """Passes file descriptor ``fd`` to the peer, beside an empty frame. Call it before any message is sent."""
    socket.send_fds(sock, [_LENGTH.pack(0)], [fd])


def recv_fd(sock: socket.socket, timeout_s: float | None = None) -> int | None:
    """Waits for the file descriptor that the peer sends first, and returns it; None if the peer sends a message
    instead (it failed to start).

    Raises EOFError if the peer has closed the channel, TimeoutError after ``timeout_s``.
    """
    poller = select.poll()  # select() knows no descriptor above 1,023
    poller.register(sock, select.POLLIN)
    if not poller.poll(None if timeout_s is None else timeout_s * 1000):
        raise TimeoutError(f"the peer sent nothing within {timeout_s} s")
    peeked = sock.recv(_LENGTH.size, socket.MSG_PEEK)
    if not peeked:
        raise EOFError("the peer closed the channel")
    if peeked != _LENGTH.pack(0):
        return None
    _, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 1)
    return fds[0] if fds else None


class EngineChannel:
    """The engine process's end of the channel: ``poll`` waits, ``send`` never does.

    ``clock`` gives monotonic seconds.
    """

    def __init__(self, sock: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        sock.setblocking(False)
        self._clock = clock
        self._sock = sock
        self._out = _Outbound(sock)
        self._in: _Inbound[ToEngine] = _Inbound(msgspec.msgpack.Decoder(ToEngine).decode)
        self._poller = select.poll()
        self._ended = False

    @property
    def closed(self) -> bool:
        """Returns whether the peer is known to have closed the channel."""
        return self._ended or self._out.gone

    def send(self, message: ToIo) -> None:
        """Queues ``message``; it leaves now if the socket has room, else at the next send, poll or flush."""
        self._out.put(message)

    def flush(self) -> None:
        """Writes as much of the queued bytes as the socket takes now."""
        self._out.write()

    def send_fd(self, fd: int) -> None:
        """Passes file descriptor ``fd`` to the peer. Call it before any message is sent."""
        send_fd(self._sock, fd)

    def poll(self, timeout_s: float | None = 0.0) -> list[ToEngine]:
        """Returns the messages that have arrived, waiting up to ``timeout_s`` seconds for the first (None: without
        limit); [] at the timeout.

        Raises EOFError once the peer has closed the channel and all its messages have been returned.
        """
        deadline = None if timeout_s is None else self._clock() + timeout_s
        while True:
            self._out.write()
            messages = self._read()
            left = None if deadline is None else deadline - self._clock()
            if messages or (left is not None and left <= 0 and not self._ended):
                return messages
            if self._ended:
                raise EOFError("the I/O process closed the channel")
            self._wait(left)

    def close(self) -> None:
        """Closes the socket; the peer sees the end of the stream."""
        self._ended = True
        self._sock.close()

    def _wait(self, timeout_s: float | None) -> None:
        events = select.POLLIN | (select.POLLOUT if self._out.pending else 0)
        self._poller.register(self._sock, events)
        self._poller.poll(None if timeout_s is None else max(1, round(timeout_s * 1e3)))

    def _read(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while not self._ended:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._ended = not data
            messages += self._in.feed(data)
        return messages


class IoChannel:
    """The I/O process's end of the channel, on the running event loop; iterating yields messages until the engine
    closes it.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = loop
        self._out = _Outbound(sock)
        self._in: _Inbound[ToIo] = _Inbound(msgspec.msgpack.Decoder(ToIo).decode)
        self._messages: deque[ToIo] = deque()
        self._fds: list[int] = []
        self._ended = False
        self._writing = False
        self._news = asyncio.Event()

    @classmethod
    async def open(cls, sock: socket.socket) -> IoChannel:
        """Takes ``sock`` over, starts to read from it, and returns the channel."""
        loop = asyncio.get_running_loop()
        channel = cls(sock, loop)
        loop.add_reader(sock.fileno(), channel._readable)
        return channel

    @property
    def closed(self) -> bool:
        """Returns whether either side has closed the channel."""
        return self._ended

    def send(self, message: ToEngine) -> None:
        """Queues ``message``; it leaves now if the socket has room, else as soon as it has."""
        self._out.put(message)
        if self._out.pending and not self._writing and not self._ended:
            self._writing = True
            self._loop.add_writer(self._sock.fileno(), self._writable)

    async def receive(self) -> ToIo:
        """Returns the next message.

        Raises EOFError once the engine has closed the channel and all its messages have been returned.
        """
        while not self._messages:
            await self._more()
        return self._messages.popleft()

    async def receive_fd(self) -> int | None:
        """Returns the file descriptor that the engine sends first; None if it sends a message instead (it failed to
        start).
        """
        while not self._fds and not self._messages:
            await self._more()
        return self._fds.pop(0) if self._fds else None

    async def __aiter__(self) -> AsyncIterator[ToIo]:
        while True:
            try:
                message = await self.receive()
            except EOFError:
                return
            yield message

    def close(self) -> None:
        """Stops reading and closes the socket; the engine sees the end of the stream. Idempotent."""
        if self._sock.fileno() < 0:
            return
        self._end()
        self._sock.close()

    async def _more(self) -> None:
        if self._ended:
            raise EOFError("the engine closed the channel")
        self._news.clear()
        await self._news.wait()

    def _end(self) -> None:
        self._ended = True
        self._news.set()
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
            self._writing = False

    def _writable(self) -> None:
        self._out.write()
        if not self._out.pending:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, fds = b"", []
        self._fds += fds
        try:
            self._messages.extend(self._in.feed(data))
        except msgspec.MsgspecError:  # the stream can't be trusted any more: the engine counts as gone
            self._end()
            raise
        self._news.set()
        if not data:
            self._end()
