"""Sets TCP options to detect dead peers soon. Knows nothing of what the connection carries."""

from __future__ import annotations

import socket

KEEPALIVE_S = 5  # seconds between probes of an idle connection
STUCK_MS = 15_000  # milliseconds that sent bytes may stay unacknowledged before the connection breaks


def notice_dead_peers(sock: socket.socket) -> None:
    """Sets TCP options of ``sock``: small frames are sent at once, and a dead or stuck peer breaks the connection
    within 15 seconds.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_MS)
