"""Carries frames over TCP: blocks' bytes go from the sender's pages directly into the receiver's.

Knows nothing of frames' contents. Only the kernel copies: once at each end. To another host a stream has several
lanes (connections), because one TCP connection seldom saturates a fast network; within a host it has one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket

from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import frames
from baton.kv.wire.base import Accept, HandoffStream, Transport
from baton.kv.wire.keepalive import notice_dead_peers
from baton.kv.wire.poller import Poller
from baton.kv.wire.receiving import SocketServer
from baton.kv.wire.secured import dial_securely
from baton.kv.wire.sending import Lane, SocketStream, SocketTransport, hello
from baton.protos.errors import ConfigError, WorkerLost
from baton.tls.identity import Identity

LANES = 4  # connections of a stream to another host
CONNECT_S = 5.0  # seconds for a lane to connect, TLS included
# Bytes of the send buffer over loopback, so that bytes in flight stay in the CPU's cache. To other hosts the kernel
# tunes it.
LOOPBACK_BUFFER_BYTES = 1 << 20


class TcpTransport(SocketTransport):
    """Implements ``Transport`` to data ports, ``host:port``, with ``lanes`` connections per stream.

    None chooses 1 for loopback addresses and LANES for others. With an ``identity`` every connection uses TLS.
    """

    def __init__(self, lanes: int | None = None, identity: Identity | None = None) -> None:
        super().__init__()
        self._lanes, self._identity = lanes, identity

    async def connect(self, address: str) -> HandoffStream:
        """Returns a new stream, all of its connections established. Raises WorkerLost."""
        stream_id, count = os.urandom(16), self._lanes or (1 if is_loopback(address) else LANES)
        greetings = [hello(number, stream_id, frames.NEWEST) for number in range(count)]
        poller = self.poller
        dialling = [dialled(address, greeting, self._identity, poller) for greeting in greetings]
        lanes = [Lane(sock, address, poller) for sock in await asyncio.gather(*dialling)]
        return SocketStream(lanes, self._streams)


def sender(memory: PageMemory, identity: Identity | None = None) -> Transport:
    """Returns the transport to any worker; ``memory`` isn't used. With an ``identity`` it is encrypted."""
    return TcpTransport(identity=identity)


def listen(host: str, accept: Accept, port: int = 0, identity: Identity | None = None) -> tuple[SocketServer, str]:
    """Starts a receiving server on the running loop; returns it and its address. ``port`` 0 takes any. Raises
    ConfigError if the port can't be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise ConfigError(f"the KV data port can't be bound on {host}: {error.strerror}", "worker.host") from None
    return SocketServer(sock, accept, _ready, identity), f"{host}:{sock.getsockname()[1]}"


def is_loopback(address: str) -> bool:
    """Returns whether the host of ``host:port`` is a loopback address."""
    host = split(address)[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ready(sock: socket.socket) -> bool:
    """Lets anyone connect: what is required is a lease's random id, and with TLS a worker's certificate."""
    notice_dead_peers(sock)
    return True


def split(address: str) -> tuple[str, int]:
    """Returns the host, without brackets, and the port of ``host:port``. Raises WorkerLost if the address has
    another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise WorkerLost(f"{address!r} is not host:port", "decode_address")
    return host.strip("[]"), int(port)


async def dialled(
    address: str, greeting: bytes, identity: Identity | None, poller: Poller, queued_bytes: int = 0
) -> socket.socket:
    """Returns a socket connected to ``address``, with TLS if ``identity`` is given, on which ``greeting`` was sent.
    Raises WorkerLost.

    ``greeting`` must fit into the send buffer, of ``queued_bytes`` bytes; 0 chooses LOOPBACK_BUFFER_BYTES or leaves
    it to the kernel.
    """
    loop, (host, port) = asyncio.get_running_loop(), split(address)
    try:
        async with asyncio.timeout(CONNECT_S):
            family, kind, proto, _, target = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
            try:
                notice_dead_peers(sock)
                if buffer := queued_bytes or (LOOPBACK_BUFFER_BYTES if is_loopback(address) else 0):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
                await loop.sock_connect(sock, target)
                if identity is not None:
                    sock = await dial_securely(sock, address, identity, poller)
                sock.send(greeting)
            except BaseException:
                sock.close()
                raise
    except OSError as error:  # a timeout is one
        raise WorkerLost(f"nobody answers at {address}: {error}", "decode_address") from error
    return sock
