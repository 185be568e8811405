"""Sets the TCP options by which a dead peer is noticed. Knows nothing of what the connection carries."""

from __future__ import annotations

import socket

KEEPALIVE_S = 5  # seconds between probes of an idle connection
STUCK_MS = 15_000  # milliseconds after which sent bytes that nobody acknowledged break the connection


def notice_dead_peers(sock: socket.socket) -> None:
    """Makes small frames leave at once, and a host that is gone or takes nothing a broken stream within
    seconds.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_MS)
