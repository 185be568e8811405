"""Takes connections and hands out those that have said who they are, any number of them side by side.

Knows nothing of keys or ranks. A stranger who says nothing, or a byte now and then, delays nobody else: time, bytes
and connections that have said too little are bounded.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

log = logging.getLogger("baton.engine")

GREET_S = 10.0  # seconds that a connection has to say who it is
MOST_WAITING = 64  # connections that haven't; one more closes the oldest: whoever has the key answers at once
PAUSE_S = 0.1  # after an accept that failed for want of descriptors: at once it would fail again


class Greeted(NamedTuple):
    """A connection that has said all that was due: ``said``, after it was sent ``asked``. Blocking, without a limit
    of time; whoever gets it closes it.
    """

    sock: socket.socket
    peer: str
    asked: bytes
    said: bytes


class _Stranger:
    """A connection that has still to say who it is."""

    def __init__(self, sock: socket.socket, peer: str, asked: bytes, until: float) -> None:
        self.sock, self.peer, self.asked, self.until = sock, peer, asked, until
        self.said = b""


class Greeter:
    """Greets whoever connects to ``listener``: sends what ``ask`` returns, at most a few hundred bytes, and reads
    ``size`` bytes. It owns the listener from then on. Use it from one thread, with ``with``.
    """

    def __init__(
        self,
        listener: socket.socket,
        size: int,
        ask: Callable[[], bytes] = bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._size, self._ask, self._clock = listener, size, ask, clock
        self._waiting: list[_Stranger] = []  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def poll(self, patience_s: float) -> list[Greeted]:
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
        stranger = _Stranger(sock, str(peer[0]), self._ask(), self._clock() + GREET_S)
        self._waiting.append(stranger)
        self._selector.register(sock, selectors.EVENT_READ, stranger)
        with suppress(OSError):  # it has gone: reading says so
            sock.send(stranger.asked)
        if len(self._waiting) > MOST_WAITING:
            self._drop_oldest(f"{MOST_WAITING} younger ones haven't said yet who they are")

    def _read(self, stranger: _Stranger) -> Greeted | None:
        """Returns the connection once it has said all."""
        try:
            said = stranger.sock.recv(self._size - len(stranger.said))
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        if not said:
            self._drop(stranger, "it ended")
            return None
        stranger.said += said
        if len(stranger.said) < self._size:
            return None
        self._forget(stranger)
        stranger.sock.setblocking(True)
        return Greeted(stranger.sock, stranger.peer, stranger.asked, stranger.said)

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
