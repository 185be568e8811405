"""TLS over a non-blocking socket that behaves like a plain one, for code that receives straight into pages.

Knows nothing of frames. OpenSSL's "wants to read" and "wants to write" are BlockingIOError, as on a plain socket;
bytes are decrypted into the caller's memory, without a further copy. epoll doesn't report bytes that OpenSSL has
decrypted beyond what was asked for: a caller that stops reading early must check ``pending``.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.tls.identity import Identity
from baton.tls.reporting import WAITS, check_peer, log_refusal

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

RECORD_BYTES = 16 << 10  # bytes of a TLS record at most (RFC 8446, 5.1), so that small buffers share one
Buffer = bytes | bytearray | memoryview


class TlsSocket(ssl.SSLSocket):
    """Speaks TLS over a non-blocking socket; made by ``accepting`` or ``dialling``, and first passed to
    ``step_handshake``.
    """

    def recv(self, count: int = 4096, flags: int = 0) -> bytes:
        """Receives up to ``count`` bytes; b"" at the end, even without a TLS goodbye. Raises BlockingIOError."""
        try:
            return super().recv(count)
        except WAITS:
            raise BlockingIOError from None

    def recv_into(self, buffer: WriteableBuffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Receives straight into ``buffer``; returns the number of bytes. Raises BlockingIOError."""
        try:
            return super().recv_into(buffer, nbytes or 0)
        except WAITS:
            raise BlockingIOError from None

    def recvmsg_into(self, buffers: Sequence[memoryview], *rest: object) -> tuple[int, list[object], int, None]:  # type: ignore[override]
        """Receives into the buffers in order, beyond the first receive only what is decrypted already.

        Returns as ``socket.recvmsg_into`` does. Raises BlockingIOError.
        """
        total = 0
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                if total and not self.pending():
                    return total, [], 0, None
                count = self.recv_into(buffer[at:])
                if not count:
                    return total, [], 0, None
                at, total = at + count, total + count
        return total, [], 0, None

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Sends ``data``; returns the number of bytes taken.

        After BlockingIOError, OpenSSL needs the same bytes again; more may follow them.
        """
        try:
            return super().send(data)
        except WAITS:
            raise BlockingIOError from None

    def sendmsg(self, buffers: Sequence[Buffer], *rest: object) -> int:  # type: ignore[override]
        """Sends the first buffer, joined with following small ones up to RECORD_BYTES; returns the number of bytes
        taken.
        """
        first = buffers[0]
        if len(first) >= RECORD_BYTES or len(buffers) == 1:
            return self.send(first)
        size, count = 0, 0
        for buffer in buffers:
            if size and size + len(buffer) > RECORD_BYTES:
                break
            size, count = size + len(buffer), count + 1
        return self.send(b"".join(buffers[:count]))


def step_handshake(sock: TlsSocket, identity: Identity, peer: str = "") -> str:
    """Continues the handshake; returns "" when done, else what to wait for: "read" or "write".

    Raises SSLError or OSError after logging it.
    """
    try:
        sock.do_handshake()
        if sock.server_side:
            check_peer(sock, identity.permit)
    except ssl.SSLWantReadError:
        return "read"
    except ssl.SSLWantWriteError:
        return "write"
    except (ssl.SSLError, OSError) as error:
        log_refusal(identity.where, error, peer)
        raise
    return ""


def accepting(sock: socket.socket, identity: Identity) -> TlsSocket:
    """Returns the server's TLS end on an accepted, non-blocking ``sock``."""
    return _wrapped(identity.current().server, sock, server_side=True)


def dialling(sock: socket.socket, identity: Identity, role: str) -> TlsSocket:
    """Returns the client's TLS end on a connected, non-blocking ``sock``; the peer must carry the name of
    ``role``.
    """
    return _wrapped(identity.current().client, sock, server_hostname=identity.files.name_of(role))


def _wrapped(
    context: ssl.SSLContext, sock: socket.socket, server_side: bool = False, server_hostname: str | None = None
) -> TlsSocket:
    context.sslsocket_class = TlsSocket
    made = context.wrap_socket(sock, server_side, do_handshake_on_connect=False, server_hostname=server_hostname)
    assert isinstance(made, TlsSocket)
    return made
