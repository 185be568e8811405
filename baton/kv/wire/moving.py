"""Runs the mover, the process that calls torch.distributed for the nccl transport; restarts it if it dies.
Torch-free.

Knows nothing of frames or pages. Staging memory is shared with the mover; the channel's owner copies between
staging and pages.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from baton.kv.memory.host_pages import PageMemory
from baton.protos.errors import WorkerLost
from baton.protos.measurements import SharedPages

MAX_MESSAGE = 64 << 10  # bytes of one message between the I/O process and its mover
# Channels to other cards have a communicator each, whose kernels wait for their peers in the card: each needs a
# hardware queue of its own, of which CUDA makes 8 unless told, and few blocks, so that all fit beside the engine's.
MOVER_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_MAX_CTAS": "8"}
LINGER_S = 30.0  # seconds that an unused mover is kept, because a preflight precedes its use


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message between the I/O process and its mover."""


class ServeRendezvous(_Message, frozen=True):
    """Asks the mover to host the rendezvous of our receivers' channels; the listening socket is sent with the
    message.
    """

    host: str
    port: int


class JoinChannel(_Message, frozen=True):
    """Asks the mover to open ``channel`` by joining process group ``group`` of two as ``rank``, with its rendezvous
    at ``host:port``.

    The descriptor of the staging memory is sent with the message. ``device`` is staging memory on our GPU instead,
    which only NCCL can send.
    """

    channel: str
    group: str
    rank: int
    host: str
    port: int
    own_host: str  # our address on the network of the connection
    staging_bytes: int
    device: SharedPages | None = None


class MoveBytes(_Message, frozen=True):
    """Asks the mover to send or receive ``size`` bytes of staging memory from byte ``offset``; ``MoveDone`` answers
    with ``number``.
    """

    channel: str
    number: int
    offset: int
    size: int


class LeaveChannel(_Message, frozen=True):
    """Asks the mover to close ``channel`` after earlier requests."""

    channel: str


class ChannelJoined(_Message, frozen=True):
    """Reports that both ends of a channel have joined it."""

    channel: str


class MoveDone(_Message, frozen=True):
    """Reports that the ``MoveBytes`` of that ``number`` is complete."""

    channel: str
    number: int


class ChannelBroken(_Message, frozen=True):
    """Reports that the channel is closed because the peer is gone, or didn't join."""

    channel: str
    why: str


class ChannelLeft(_Message, frozen=True):
    """Reports, as the last message of a channel, that the mover no longer uses its staging memory."""

    channel: str


ToMover = ServeRendezvous | JoinChannel | MoveBytes | LeaveChannel
FromMover = ChannelJoined | MoveDone | ChannelBroken | ChannelLeft
Listener = Callable[[ChannelJoined | MoveDone | ChannelBroken], None]


class MoverClient:
    """Controls one mover process, which calls torch.distributed; it is started on demand and ends with
    ``close``.
    """

    def __init__(self) -> None:
        self.pid = 0
        self._sock: socket.socket | None = None
        self._watching: asyncio.AbstractEventLoop | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._listeners: dict[str, Listener] = {}
        self._held: dict[str, Callable[[], None] | None] = {}  # by the mover, channels: what to do once they aren't
        self._serving: tuple[ServeRendezvous, socket.socket] | None = None
        self._decode = msgspec.msgpack.Decoder(FromMover).decode

    def serve(self, host: str, sock: socket.socket, at_once: bool = True) -> None:
        """Makes the mover host the rendezvous of receivers' channels at listening socket ``sock``, also after a
        restart.

        The mover starts now (``at_once``) or with the first channel.
        """
        self._serving = (ServeRendezvous(host, sock.getsockname()[1]), sock)
        if at_once or self._sock is not None:
            self._send(*self._serving_message())

    def join(self, join: JoinChannel, staging: PageMemory, listener: Listener) -> None:
        """Opens the channel of ``join``; ``listener`` gets its reports until it is broken or left. Raises
        WorkerLost.
        """
        self._listeners[join.channel], self._held[join.channel] = listener, None
        self._send(join, staging.fd)

    def move(self, move: MoveBytes) -> None:
        """Sends or receives the next message of a channel. Raises WorkerLost if the mover died."""
        self._send(move)

    def leave(self, channel: str, let_go: Callable[[], None] | None = None) -> None:
        """Closes a channel, whose listener gets no more reports.

        ``let_go`` is called once the mover no longer uses the channel's staging memory.
        """
        if let_go is not None and channel in self._held:
            self._held[channel] = let_go
        elif let_go is not None:
            let_go()
        if self._listeners.pop(channel, None) is not None:
            with suppress(WorkerLost):  # then it is left as well
                self._send(LeaveChannel(channel))

    def close(self) -> None:
        """Ends the mover process; every channel breaks."""
        self._serving = None
        self._lost("the transport was closed")

    def _serving_message(self) -> tuple[ServeRendezvous, int]:
        assert self._serving is not None
        return self._serving[0], self._serving[1].fileno()

    def _send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        if self._sock is None:
            self._start()
            if self._serving is not None and not isinstance(message, ServeRendezvous):
                self._send(*self._serving_message())
        assert self._sock is not None
        data = msgspec.msgpack.encode(message)
        try:
            if fd is None:
                self._sock.send(data)
            else:
                socket.send_fds(self._sock, [data], [fd])
        except OSError as error:
            self._lost(f"the mover process is gone ({error.strerror})")
            raise WorkerLost("the mover process of the nccl transport died", "worker.kv_transport") from error

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        fd = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baton.engine.mover", str(fd)],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            env=MOVER_ENVIRONMENT | os.environ,
        )
        theirs.close()
        self.pid = self._process.pid
        self._sock = ours
        self._watch()

    def _watch(self) -> None:
        assert self._sock is not None
        self._watching = asyncio.get_running_loop()
        self._watching.add_reader(self._sock.fileno(), self._readable)

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(MAX_MESSAGE)
        except OSError:  # it was killed with words of ours unread
            data = b""
        if not data:
            self._lost("the mover process died")
            return
        message = self._decode(data)
        if isinstance(message, ChannelLeft):
            self._let_go(message.channel)
            return
        listener = self._listeners.get(message.channel)
        if isinstance(message, ChannelBroken):
            self._listeners.pop(message.channel, None)
        if listener is not None:
            listener(message)

    def _lost(self, why: str) -> None:
        if self._sock is not None:
            if self._watching is not None:
                self._watching.remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = self._watching = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        listeners, self._listeners = self._listeners, {}
        for channel, listener in listeners.items():
            listener(ChannelBroken(channel, why))
        for channel in tuple(self._held):
            self._let_go(channel)

    def _let_go(self, channel: str) -> None:
        if (let_go := self._held.pop(channel, None)) is not None:
            let_go()


class _SharedMover:
    """A mover shared by all senders of an event loop, kept for a while after its last user."""

    def __init__(self) -> None:
        self.mover, self.users = MoverClient(), 0


_lent: dict[asyncio.AbstractEventLoop, _SharedMover] = {}


def borrow() -> MoverClient:
    """Returns the client of the mover process that all senders of the running loop share. Call ``give_back`` after
    use.
    """
    lent = _lent.setdefault(asyncio.get_running_loop(), _SharedMover())
    lent.users += 1
    return lent.mover


def give_back() -> None:
    """Ends one use of the running loop's shared mover, which is closed LINGER_S seconds after its last user."""
    loop = asyncio.get_running_loop()
    lent = _lent[loop]
    lent.users -= 1
    loop.call_later(LINGER_S, _end_if_unused, lent)


def _end_if_unused(lent: _SharedMover) -> None:
    if not lent.users:
        lent.mover.close()  # the next who borrows it starts it again
