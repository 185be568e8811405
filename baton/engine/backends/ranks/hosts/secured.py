"""TLS between the hosts of a worker's ranks: both ends show a worker's certificate of the cluster's CA.

Knows nothing of what connections carry. Without TLS files everything is as plain as it was.
"""

from __future__ import annotations

import socket
import ssl

from baton.tls.identity import Identity, TlsFiles, only_roles
from baton.tls.reporting import cause
from baton.tls.sockets import TlsSocket, dialling, step_handshake

ROLE = "worker"
ALERT = bytes.fromhex("15030300020246")  # TLS's fatal alert protocol_version (RFC 8446, 6.2), for who speaks none
ALERT_BEGIN = ALERT[:2]
TLS_HELLO_BEGIN = b"\x16\x03"  # of a client that speaks TLS


def rank_identity(files: TlsFiles | None, where: str) -> Identity | None:
    """Returns this process's identity towards ranks of other hosts; only workers may connect. None without TLS.

    ``where`` names the port in the log. Raises ConfigError.
    """
    return None if files is None else Identity(files, where, only_roles(files, [ROLE]))


def dial_securely(sock: socket.socket, identity: Identity, peer: str) -> TlsSocket:
    """Returns the TLS connection over the connected ``sock``, which it takes over, within the socket's own limit of
    time. Raises OSError, after it was logged.
    """
    found = dialling(sock, identity, ROLE)
    try:
        step_handshake(found, identity, peer)
    except BaseException:
        found.close()
        raise
    return found


def reason(error: OSError) -> str:
    """Returns in words why a connection failed, where it was TLS with its cause."""
    return cause(error) if isinstance(error, ssl.SSLError) else str(error)
