"""Carries messages between a worker's lead and the hosts of its other ranks, over one TCP connection each.

Knows nothing of what is said. Both ends prove that they hold the same key, by HMAC of the other's random number
(RFC 2104). Where the cluster has certificates, connections are TLS's and both ends show a worker's certificate;
without, nothing is encrypted. With neither certificates nor a key only loopback addresses may be used.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from baton.engine.backends.ranks.hosts.greeting import GREET_S
from baton.engine.backends.ranks.hosts.relay import relayed
from baton.engine.backends.ranks.hosts.secured import ALERT_BEGIN, TLS_HELLO_BEGIN, dial_securely, reason
from baton.kv.wire.keepalive import notice_dead_peers
from baton.protos.errors import ConfigError, StartupError
from baton.protos.version import product_version
from baton.tls.identity import Identity
from baton.tls.sockets import TlsSocket

NONCE = 32  # bytes of a random number, and of its answer
HELLO = b"baton ranks\n"  # what a lead says before anything else, so that a port of another kind shows itself
SAID = len(HELLO) + 2 * NONCE  # bytes that a lead says: HELLO, its answer, and a random number of its own
LENGTH = 8  # bytes of a message's length
MOST_BYTES = 1 << 34  # of one message
MOST_PORT = 65535  # the highest TCP port
RETRY_S = 0.5  # between two tries to reach a host
KEY_FIELD = "worker.rank_key_file"
LEAD, HOST = b"lead", b"host"
AT_ONCE = "ended the connection at once: it is no `baton ranks`, or has too many connections"

Message = TypeVar("Message")


class Control:
    """Sends and receives messages, JSON behind its length, over ``sock``, which it owns.

    ``here`` is this end's IP address, at which the other end's host reaches this one, and ``there`` the other's;
    empty: the socket's own, which a relay's hasn't.
    """

    def __init__(self, sock: socket.socket, here: str = "", there: str = "") -> None:
        self.sock = sock
        self.here = here or str(sock.getsockname()[0])
        self.there = there or str(sock.getpeername()[0])

    def send(self, message: msgspec.Struct) -> None:
        """Sends ``message`` as JSON to the other end. Raises ConnectionError."""
        self.send_bytes(msgspec.json.encode(message))

    def send_bytes(self, said: bytes | memoryview) -> None:
        """Sends bytes as one message. Raises ConnectionError."""
        self.sock.sendall(len(said).to_bytes(LENGTH, "little"))
        self.sock.sendall(said)

    def receive(self, decoder: msgspec.json.Decoder[Message]) -> Message:
        """Returns the next message, as ``decoder`` knows it. Raises ConnectionError, also for anything else."""
        try:
            return decoder.decode(self.receive_bytes())
        except msgspec.MsgspecError as error:
            text = f"what came is no message that baton {product_version()} knows ({error})"
            raise ConnectionError(f"{text}; install the same version on all hosts") from error

    def receive_bytes(self) -> bytearray:
        """Returns the bytes of the next message. Raises ConnectionError at the connection's end."""
        size = int.from_bytes(exactly(self.sock, LENGTH), "little")
        if size > MOST_BYTES:
            raise ConnectionError(f"a message of {size} bytes")
        return exactly(self.sock, size)

    def close(self) -> None:
        """Ends the connection, also for another thread that reads from it."""
        with suppress(OSError):  # it has ended already
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def exactly(sock: socket.socket, size: int) -> bytearray:
    """Returns the next ``size`` bytes of a connection. Raises ConnectionError if it ends before."""
    found = bytearray(size)
    view = memoryview(found)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionError("the connection has ended")
        view = view[got:]
    return found


def read_key(path: str) -> bytes:
    """Returns the key in the file at ``path``; empty if ``path`` is. Raises ConfigError."""
    if not path:
        return b""
    try:
        found = Path(os.path.expanduser(path)).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{KEY_FIELD} {path}: {error.strerror}", KEY_FIELD) from None
    if len(found) < 16:
        raise ConfigError(f"{KEY_FIELD} {path}: a key has 16 bytes or more", KEY_FIELD)
    return found


def require_key(key: bytes, address: str) -> None:
    """Checks that there is a key unless the IP ``address`` is a loopback one. Raises ConfigError."""
    if not key and not ipaddress.ip_address(address.split("%")[0]).is_loopback:
        text = f"{address}: ranks of other hosts need a key that all hosts have, in the file {KEY_FIELD}"
        raise ConfigError(text, KEY_FIELD)


def answer_to_lead(key: bytes, asked: bytes, said: bytes) -> bytes | None:
    """Returns the proof that this end has the key, for a lead that was asked ``asked`` and has said ``said``, SAID
    bytes; None if the lead hasn't the key.
    """
    proof, theirs = said[len(HELLO) : -NONCE], said[-NONCE:]
    return _proof(key, HOST, theirs) if hmac.compare_digest(proof, _proof(key, LEAD, asked)) else None


def refusal(said: bytes) -> str:
    """Returns in words why a lead that has said ``said`` is refused."""
    if said.startswith(TLS_HELLO_BEGIN):
        return "speaks TLS, and this host has no [tls]"
    return "hasn't the key"


def dial(address: str, key: bytes, field: str, wait_s: float = 0.0, identity: Identity | None = None) -> Control:
    """Returns a connection to the host of ranks at ``address`` (host:port), for which it waits up to ``wait_s``
    seconds; by TLS if there is an ``identity``. Raises ConfigError and StartupError.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MOST_PORT:
        raise ConfigError(f"{field}: {address!r} is not host:port", field)
    sock = _reached(host.strip("[]"), int(port), field, time.monotonic() + wait_s)
    try:
        here, there = _ends(sock, address, field)
        if identity is None:
            require_key(key, there)
        else:
            sock = _secured(sock, identity, address, field)
        _prove(sock, key, address, field)
        return Control(relayed(sock) if isinstance(sock, TlsSocket) else sock, here, there)
    except BaseException:
        sock.close()
        raise


def _ends(sock: socket.socket, address: str, field: str) -> tuple[str, str]:
    """Returns the IP addresses of this end of a connection and of the other. Raises StartupError if it ended."""
    try:
        notice_dead_peers(sock)
        return str(sock.getsockname()[0]), str(sock.getpeername()[0])
    except OSError as error:
        raise StartupError(f"{field}: {address} {AT_ONCE} ({error})", field) from None


def _secured(sock: socket.socket, identity: Identity, address: str, field: str) -> TlsSocket:
    try:
        return dial_securely(sock, identity, address)
    except OSError as error:
        text = f"{field}: no TLS with `baton ranks` at {address}: {reason(error)}"
        raise StartupError(text, field) from None


def _reached(host: str, port: int, field: str, until: float) -> socket.socket:
    """Returns a connection to whoever listens there by the time ``until``, as time.monotonic has it. Raises
    StartupError.
    """
    while True:
        try:
            return socket.create_connection((host, port), GREET_S)
        except OSError as error:
            if time.monotonic() >= until:
                text = f"{field}: no `baton ranks` answers at {host}:{port}: {error}"
                raise StartupError(text, field) from None
        except ValueError as error:  # of a label that no host name may have
            raise ConfigError(f"{field}: {host!r} is no host's name or address: {error}", field) from None
        time.sleep(RETRY_S)


def _prove(sock: socket.socket, key: bytes, address: str, field: str) -> None:
    ours, asked = os.urandom(NONCE), b""
    early, late = (b"", HELLO) if isinstance(sock, TlsSocket) else (HELLO, b"")  # of TLS an alert is read first
    try:
        sock.sendall(early)
        while len(asked) < NONCE and (got := sock.recv(NONCE - len(asked))):
            asked += got
        if len(asked) < NONCE:
            raise StartupError(f"{field}: {address} {_silence(sock, asked)}", field)
        sock.sendall(late + _proof(key, LEAD, asked) + ours)
        if not hmac.compare_digest(bytes(exactly(sock, NONCE)), _proof(key, HOST, ours)):
            raise ConnectionError("it has another key")
    except ssl.SSLError as error:  # TLS 1.3: a server refuses after the client's handshake
        raise StartupError(f"{field}: no TLS with `baton ranks` at {address}: {reason(error)}", field) from None
    except OSError as error:
        raise StartupError(
            f"{address}: its {KEY_FIELD} isn't this one's, or it is no `baton ranks` of baton {product_version()} "
            f"({error})"
        ) from None
    sock.settimeout(None)


def _silence(sock: socket.socket, said: bytes) -> str:
    """Returns in words why a host ended the connection before it has asked for a proof."""
    if isinstance(sock, TlsSocket):
        return "refuses this worker's certificate, and its log says why: it takes those of a worker"
    if said.startswith(ALERT_BEGIN):
        return "speaks TLS, and this worker doesn't: set [tls] here, with a certificate of the same CA"
    return AT_ONCE


def _proof(key: bytes, role: bytes, asked: bytes) -> bytes:
    return hmac.new(key, role + asked, hashlib.sha256).digest()
