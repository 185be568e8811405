"""Connects ranks of different hosts: each dials all other hosts, where a thread writes what it sends to memory.

Knows nothing of steps. The native code sends and reads (kernels/collective/links.h); here connections begin.
"""

from __future__ import annotations

import ctypes
import hmac
import socket
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.backends.ranks.hosts.control import exactly
from baton.engine.backends.ranks.hosts.greeting import Greeter
from baton.engine.backends.ranks.hosts.layout import MOST_HOSTS
from baton.engine.backends.ranks.hosts.relay import relayed
from baton.engine.backends.ranks.hosts.secured import dial_securely, reason
from baton.engine.backends.ranks.link_plan import LINK_S, LinkPlan
from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, P
from baton.kv.wire.keepalive import notice_dead_peers
from baton.protos.errors import StartupError
from baton.tls.identity import Identity
from baton.tls.sockets import TlsSocket

TOKEN = 32  # bytes of a worker's random token
RANK = 4  # bytes of a rank's number
WELCOME = b"1"
LOOK_S = 1.0  # seconds between two looks at whether connections are still taken


class LinksStruct(ctypes.Structure):
    """Mirrors the C struct Links of collective/links.h."""

    _fields_ = (
        *((name, P) for name in ("memory", "pages", "host_of", "queues")),
        ("fds", I32 * MOST_HOSTS),
        ("host", I32),
        ("hosts", I32),
    )


class HostMemory(NamedTuple):
    """The addresses and sizes in bytes of a host's shared memory and its KV pages; ``kept`` keeps both mapped."""

    memory: int
    memory_bytes: int
    pages: int
    page_bytes: int
    kept: tuple[object, ...]


class Links:
    """Holds the connections of rank ``rank`` to all other hosts, by TLS if there is an ``identity``; ``address`` is
    of the C struct.
    """

    def __init__(
        self,
        plan: LinkPlan,
        rank: int,
        memory: int,
        pages: int,
        bound_s: float,
        identity: Identity | None = None,
    ) -> None:
        own = plan.places[rank]
        self._host_of = (I32 * len(plan.places))(*plan.places)
        self._sockets = {
            host: _dialled(address, plan.token, rank, bound_s, identity)
            for host, address in enumerate(plan.addresses)
            if host != own
        }
        fds = (self._sockets[host].fileno() if host in self._sockets else -1 for host in range(MOST_HOSTS))
        at = ctypes.addressof(self._host_of)
        self._struct = LinksStruct(memory, pages, at, None, (I32 * MOST_HOSTS)(*fds), own, len(plan.addresses))
        self.address = ctypes.addressof(self._struct)

    def close(self) -> None:
        """Ends the connections; nothing may be sent over them any more."""
        native.function("links_close", P)(self.address)
        for sock in self._sockets.values():
            sock.close()


class LinkServer:
    """Takes connections of other hosts' ranks at IP address ``here``, by TLS if there is an ``identity``; ``port``
    is its own. Threads write what comes.
    """

    def __init__(self, here: str, identity: Identity | None = None) -> None:
        self._identity = identity
        family = socket.AF_INET6 if ":" in here else socket.AF_INET
        self._listener = socket.create_server((here, 0), family=family, backlog=128)
        self.address = (here, int(self._listener.getsockname()[1]))
        self._linked, self._closed = threading.Event(), threading.Event()
        self._greets: threading.Thread | None = None
        self._threads: list[threading.Thread] = []

    def start(self, plan: LinkPlan, host: int, mapped: HostMemory) -> None:
        """Begins to take the connections of all ranks that aren't on ``host``, the own one."""
        awaited = plan.ranks_elsewhere(host)
        arguments = plan.token, awaited, mapped
        self._greets = threading.Thread(target=self._accept, args=arguments, name="links", daemon=True)
        self._greets.start()

    def await_all(self) -> None:
        """Returns when all have connected. Raises StartupError after LINK_S seconds."""
        if not self._linked.wait(LINK_S):
            raise StartupError(f"ranks of other hosts didn't connect to {self.address} within {LINK_S:.0f} s")

    def join(self, patience_s: float) -> None:
        """Waits up to ``patience_s`` seconds for each connection's end."""
        for thread in self._threads:
            thread.join(patience_s)

    def close(self) -> None:
        """Stops to take connections."""
        self._closed.set()
        if self._greets is None:
            self._listener.close()

    def _accept(self, token: bytes, awaited: set[int], mapped: HostMemory) -> None:
        """Takes each awaited rank's connection once; what strangers do delays none of them."""
        with Greeter(self._listener, TOKEN + RANK, identity=self._identity) as greeter:
            while awaited and not self._closed.is_set():
                for greeted in greeter.poll(LOOK_S):
                    rank = _rank_of(greeted.said, token)
                    if rank not in awaited:
                        greeted.sock.close()
                        continue
                    awaited.discard(rank)
                    arguments = greeted.sock, rank, mapped
                    thread = threading.Thread(target=_receive, args=arguments, name="link", daemon=True)
                    self._threads.append(thread)
                    thread.start()
        if not awaited:
            self._linked.set()


def _rank_of(said: bytes, token: bytes) -> int:
    """Returns the number of the rank that has said so; -1 for anyone who hasn't the token."""
    return int.from_bytes(said[TOKEN:], "little") if hmac.compare_digest(said[:TOKEN], token) else -1


def _receive(sock: socket.socket, rank: int, mapped: HostMemory) -> None:
    with sock:
        try:
            sock.sendall(WELCOME)
        except OSError:  # it has gone again: it says itself that it couldn't connect
            return
        receive = native.function("links_receive", I32, P, I64, P, I64, I32, result=I32)
        receive(sock.fileno(), *mapped[:4], rank)


def _dialled(
    address: Sequence[str | int], token: bytes, rank: int, bound_s: float, identity: Identity | None
) -> socket.socket:
    """Returns a connection to a host; sending more than it takes for ``bound_s`` seconds fails (0: never)."""
    host, port = address
    try:
        sock = socket.create_connection((str(host), int(port)), LINK_S)
        notice_dead_peers(sock)
        if identity is not None:
            sock = dial_securely(sock, identity, f"{host}:{port}")
        sock.sendall(token + rank.to_bytes(RANK, "little"))
        exactly(sock, len(WELCOME))
    except OSError as error:
        raise StartupError(f"rank {rank} can't reach the ranks at {host}:{port}: {reason(error)}") from None
    if isinstance(sock, TlsSocket):
        sock = relayed(sock)
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(bound_s), int(bound_s % 1 * 1e6)))
    return sock
