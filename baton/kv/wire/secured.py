"""Completes TLS handshakes, on the event loop, on sockets that will carry frames.

Knows nothing of frames. Each end requires a worker's certificate of the other.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from baton.kv.wire.poller import Poller
from baton.kv.wire.sending import wake
from baton.protos.errors import WorkerLost
from baton.tls.identity import Identity
from baton.tls.reporting import cause, log_refusal
from baton.tls.sockets import TlsSocket, dialling, step_handshake

HANDSHAKE_S = 5.0  # seconds that a peer has for the TLS handshake
ROLE = "worker"  # the role that a receiver's certificate must carry


class TlsHandshake:
    """Completes the TLS handshake of an accepted connection.

    ``ready`` is then called with the socket, or ``gone`` if the connection was closed instead.
    """

    def __init__(
        self,
        sock: TlsSocket,
        peer: str,
        identity: Identity,
        poller: Poller,
        ready: Callable[[TlsHandshake, TlsSocket], None],
        gone: Callable[[TlsHandshake], object],
    ) -> None:
        self._sock, self._peer, self._identity, self._poller = sock, peer, identity, poller
        self._ready, self._gone = ready, gone
        self._over = False

    def begin(self) -> None:
        """Starts the handshake and its time limit of ``HANDSHAKE_S`` seconds."""
        asyncio.get_running_loop().call_later(HANDSHAKE_S, self._too_late)
        self._step()

    def close(self, reset: bool = False) -> None:
        """Closes the connection at once. A second call does nothing."""
        if not self._over:
            self._over = True
            self._poller.forget(self._sock.fileno())
            self._sock.close()
            self._gone(self)

    def _too_late(self) -> None:
        if not self._over:
            log_refusal(self._identity.where, TimeoutError(f"no handshake within {HANDSHAKE_S:g} s"), self._peer)
            self.close()

    def _step(self) -> None:
        if self._over:
            return
        try:
            wait = step_handshake(self._sock, self._identity, self._peer)
        except OSError:  # it was told
            self.close()
            return
        fd = self._sock.fileno()
        self._poller.forget(fd)
        if wait:
            (self._poller.writes if wait == "write" else self._poller.reads)(fd, self._step)
            return
        self._over = True
        self._ready(self, self._sock)


def holds_bytes(sock: socket.socket) -> bool:
    """Returns whether decrypted bytes wait in ``sock``, which no epoll reports."""
    return isinstance(sock, TlsSocket) and sock.fileno() >= 0 and bool(sock.pending())


async def dial_securely(sock: socket.socket, address: str, identity: Identity, poller: Poller) -> TlsSocket:
    """Completes the TLS handshake on a connected socket and returns the TLS socket. Raises WorkerLost with the
    cause.
    """
    secured = dialling(sock, identity, ROLE)
    try:
        while wait := step_handshake(secured, identity, address):
            await _until(secured.fileno(), poller, wait == "write")
    except OSError as error:
        secured.close()
        text = f"no TLS with the decode worker at {address}: {cause(error)}"
        raise WorkerLost(text, "decode_address") from error
    except BaseException:
        poller.forget(secured.fileno())
        secured.close()
        raise
    return secured


async def _until(fd: int, poller: Poller, write: bool) -> None:
    waiting = asyncio.get_running_loop().create_future()
    (poller.writes if write else poller.reads)(fd, lambda: wake(waiting))
    try:
        await waiting
    finally:
        poller.forget(fd)
