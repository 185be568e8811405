"""Takes connections and hands out those that have said who they are, any number of them side by side.

Knows nothing of keys or ranks. A stranger who says nothing, or a byte now and then, delays nobody else: time, bytes
and connections that have said too little are bounded. With an identity connections are TLS's, and its handshake is
part of what they have to say in time.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from baton.engine.backends.ranks.hosts.relay import relayed
from baton.engine.backends.ranks.hosts.secured import ALERT
from baton.kv.wire.keepalive import notice_dead_peers
from baton.tls.identity import Identity
from baton.tls.reporting import PLAINTEXT, cause
from baton.tls.sockets import TlsSocket, accepting, step_handshake

log = logging.getLogger("baton.engine")

GREET_S = 10.0  # seconds that a connection has to say who it is
MOST_WAITING = 64  # connections that haven't; one more closes the oldest: whoever has the key answers at once
PAUSE_S = 0.1  # after an accept that failed for want of descriptors: at once it would fail again


class GreetedPeer(NamedTuple):
    """A connection that has said all that was due: ``said``, after it was sent ``asked``. Blocking, without a limit
    of time; whoever gets it closes it. ``here`` is this end's IP address. Of TLS ``sock`` is the local end of a
    relay.
    """

    sock: socket.socket
    peer: str
    asked: bytes
    said: bytes
    here: str


class _Stranger:
    """A connection that has still to say who it is."""

    def __init__(self, sock: socket.socket, peer: str, asked: bytes, until: float) -> None:
        self.sock, self.peer, self.asked, self.until = sock, peer, asked, until
        self.said = b""
        self.here = str(sock.getsockname()[0])
        self.is_asked = False


class Greeter:
    """Greets whoever connects to ``listener``: sends what ``ask`` returns, at most a few hundred bytes, and reads
    ``size`` bytes, by TLS if there is an ``identity``. It owns the listener from then on. Use it from one thread,
    with ``with``.
    """

    def __init__(
        self,
        listener: socket.socket,
        size: int,
        ask: Callable[[], bytes] = bytes,
        clock: Callable[[], float] = time.monotonic,
        identity: Identity | None = None,
    ) -> None:
        listener.setblocking(False)
        self._identity = identity
        self._listener, self._size, self._ask, self._clock = listener, size, ask, clock
        self._waiting: list[_Stranger] = []  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def poll(self, patience_s: float) -> list[GreetedPeer]:
        """Waits up to ``patience_s`` seconds for something to come; returns the connections that have said all."""
        found = []
        for key, _ in self._selector.select(patience_s):
            if key.data is None:
                self._accept()
            elif key.data in self._waiting and (greeted := self._read(key.data)) is not None:
                found.append(greeted)
        while self._waiting and self._waiting[0].until <= self._clock():
            self._drop_oldest("it didn't say in time who it is")
        return found

    def __enter__(self) -> Greeter:
        return self

    def __exit__(self, *_: object) -> None:
        while self._waiting:
            self._drop_oldest("nobody listens any more")
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._drop_oldest(f"there is room for no more connections ({error})")
                time.sleep(PAUSE_S)
            return  # else it has gone again
        sock.setblocking(False)
        if self._identity is not None:
            try:
                sock = accepting(sock, self._identity)
            except OSError:  # it has gone again
                sock.close()
                return
        stranger = _Stranger(sock, str(peer[0]), self._ask(), self._clock() + GREET_S)
        self._waiting.append(stranger)
        self._selector.register(sock, selectors.EVENT_READ, stranger)
        with suppress(OSError):  # it has gone: reading says so
            notice_dead_peers(sock)
            if self._identity is None:
                self._ask_who(stranger)
        if len(self._waiting) > MOST_WAITING:
            self._drop_oldest(f"{MOST_WAITING} younger ones haven't said yet who they are")

    def _ask_who(self, stranger: _Stranger) -> None:
        stranger.sock.send(stranger.asked)
        stranger.is_asked = True

    def _read(self, stranger: _Stranger) -> GreetedPeer | None:
        """Returns the connection once it has said all."""
        try:
            if self._identity is not None and not stranger.is_asked and not self._shakes(stranger, self._identity):
                return None
            while len(stranger.said) < self._size:
                if not (got := stranger.sock.recv(self._size - len(stranger.said))):
                    raise ConnectionError("it ended")
                stranger.said += got
        except BlockingIOError:
            return None
        except OSError as error:
            self._drop(stranger, str(error))
            return None
        self._forget(stranger)
        return GreetedPeer(_blocking(stranger.sock), stranger.peer, stranger.asked, stranger.said, stranger.here)

    def _shakes(self, stranger: _Stranger, identity: Identity) -> bool:
        """Goes on with TLS's handshake; returns whether it is done, and who it is was asked. Raises OSError."""
        assert isinstance(stranger.sock, TlsSocket)
        try:
            wait = step_handshake(stranger.sock, identity, stranger.peer)
        except ssl.SSLError as error:
            if cause(error) == PLAINTEXT:
                _alert(stranger.sock)
            raise
        if wait:
            event = selectors.EVENT_READ if wait == "read" else selectors.EVENT_WRITE
            self._selector.modify(stranger.sock, event, stranger)
            return False
        self._selector.modify(stranger.sock, selectors.EVENT_READ, stranger)
        self._ask_who(stranger)
        return True

    def _drop_oldest(self, why: str) -> None:
        if self._waiting:
            self._drop(self._waiting[0], why)

    def _drop(self, stranger: _Stranger, why: str) -> None:
        log.debug("the connection from %s is closed: %s", stranger.peer, why)
        self._forget(stranger)
        stranger.sock.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._waiting.remove(stranger)
        self._selector.unregister(stranger.sock)


def _alert(sock: TlsSocket) -> None:
    """Tells a peer that speaks no TLS that this port does, in the words that it can tell TLS by."""
    with suppress(OSError):
        socket.socket.recv(sock, 4096)  # unread it would turn the end into a reset
        socket.socket.send(sock, ALERT)


def _blocking(sock: socket.socket) -> socket.socket:
    """Returns a blocking socket for a connection that was greeted."""
    if isinstance(sock, TlsSocket):
        return relayed(sock)
    sock.setblocking(True)
    return sock
