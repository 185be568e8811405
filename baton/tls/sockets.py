"""TLS over a non-blocking socket that behaves like the socket below it, for both ends of a stream of bulk data.

Knows nothing of frames. OpenSSL's "wants to read" and "wants to write" are BlockingIOError, as on a plain socket.
Who sends has OpenSSL's own socket, as records leave one by one anyway; who receives has one that fetches many
records at a time (``buffered``).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Any

from baton.tls.buffered import BufferedTls
from baton.tls.identity import Identity
from baton.tls.reporting import WAITS, check_peer, complain

RECORD_BYTES = 16 << 10
Buffer = bytes | bytearray | memoryview


class TlsSocket(ssl.SSLSocket):
    """Made by ``dialling``; ``step_handshake`` comes first."""

    def recv(self, count: int = 4096, flags: int = 0) -> bytes:
        """As on a plain socket; empty at the end, also where the peer said no goodbye."""
        try:
            return super().recv(count)
        except WAITS:
            raise BlockingIOError from None

    def send(self, data: Any, flags: int = 0) -> int:
        """OpenSSL wants the same bytes again after BlockingIOError; more may follow them."""
        try:
            return super().send(data)
        except WAITS:
            raise BlockingIOError from None

    def sendmsg(self, buffers: Sequence[Buffer], *rest: Any) -> int:  # type: ignore[override]
        """The first; small ones are joined to about one record."""
        first = buffers[0]
        if len(first) >= RECORD_BYTES or len(buffers) == 1:
            return self.send(first)
        size, count = 0, 0
        for buffer in buffers:
            if size and size + len(buffer) > RECORD_BYTES:
                break
            size, count = size + len(buffer), count + 1
        return self.send(b"".join(buffers[:count]))


Secured = TlsSocket | BufferedTls


def step_handshake(sock: Secured, identity: Identity, peer: str = "") -> str:
    """Go on with it: "" when done, else what to wait for, "read" or "write". Raises SSLError, and tells the log."""
    try:
        sock.do_handshake()
        if sock.server_side:
            check_peer(sock, identity.permit)
    except ssl.SSLWantReadError:
        return "read"
    except ssl.SSLWantWriteError:
        return "write"
    except (ssl.SSLError, OSError) as error:
        complain(identity.where, error, peer)
        raise
    return ""


def accepting(sock: socket.socket, identity: Identity) -> BufferedTls:
    """The server's end on an accepted, non-blocking ``sock``, for bulk data that comes in."""
    return BufferedTls(sock, identity.current().server)


def dialling(sock: socket.socket, identity: Identity, role: str) -> TlsSocket:
    """The client's end on a connected, non-blocking ``sock``; the peer must carry the name of ``role``."""
    context, name = identity.current().client, identity.files.name_of(role)
    context.sslsocket_class = TlsSocket
    made: TlsSocket = context.wrap_socket(sock, do_handshake_on_connect=False, server_hostname=name)  # type: ignore[assignment]
    return made
