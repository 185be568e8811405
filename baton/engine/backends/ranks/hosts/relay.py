"""Passes bytes between a TLS connection and a local socket, so that native code needs to know no TLS.

Knows nothing of ranks, keys or what the bytes mean. OpenSSL lets one thread at a time use a connection, so that one
thread serves both directions. The native code that sends or reads holds no interpreter lock meanwhile.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import defaultdict

from baton.tls.sockets import RECORD_BYTES, TlsSocket

log = logging.getLogger("baton.engine")

AT_ONCE = 1 << 18  # bytes that a direction holds at most
TURN = 64  # pieces of one direction before the other one has its turn


def relayed(far: TlsSocket) -> socket.socket:
    """Returns a local, blocking socket that stands for ``far``, whose handshake is done; a thread passes bytes on.

    The relay owns ``far``. Whatever ends on one side ends on the other: the local socket's end is the connection's,
    and a connection that breaks, or whose bytes were changed on the way, ends the local socket. What was sent
    before an end arrives; what is still sent to a peer that has ended is lost, as OpenSSL writes no more then.
    """
    near, inner = socket.socketpair()
    inner.setblocking(False)
    far.setblocking(False)
    threading.Thread(target=_relay, args=(inner, far), name="tls relay", daemon=True).start()
    return near


class _Flow:
    """One direction: from ``source`` to ``sink``, both non-blocking."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self._source, self._sink = source, sink
        self._room = memoryview(bytearray(AT_ONCE))
        self._rest = self._room[:0]
        self.ended, self._is_last = False, False  # the second: the source has ended behind what is held
        self.waits: tuple[socket.socket, int] | None = None  # for which event; None: there is more to do at once

    def move(self) -> None:
        """Passes on what there is, for a turn at most. Raises OSError if either side is broken."""
        for _ in range(TURN):
            at, event = (self._sink, select.POLLOUT) if self._rest else (self._source, select.POLLIN)
            try:
                self._step()
            except BlockingIOError:
                self.waits = at, event
                return
            if self.ended:
                return
        self.waits = None

    def _step(self) -> None:
        if self._rest:
            self._rest = self._rest[self._sink.send(self._rest) :]
        elif not self._is_last and (got := self._read()):
            self._rest = self._room[:got]
        else:
            self.ended, self.waits = True, None
            socket.socket.shutdown(self._sink, socket.SHUT_WR)  # of the TCP connection: all that was sent arrives

    def _read(self) -> int:
        """Reads what there is, several TLS records at once; returns the number of bytes, 0 at the end."""
        found = got = self._source.recv_into(self._room)
        while got == RECORD_BYTES and found < AT_ONCE:  # a whole record: more may be there
            try:
                got = self._source.recv_into(self._room[found:])
            except BlockingIOError:
                break
            found, self._is_last = found + got, not got  # OpenSSL tells an end once
        return found


def _relay(inner: socket.socket, far: TlsSocket) -> None:
    flows = [_Flow(inner, far), _Flow(far, inner)]
    with inner, far:
        try:
            while flows:
                for flow in flows:
                    flow.move()
                flows = [flow for flow in flows if not flow.ended]
                if all(flow.waits for flow in flows):
                    _await_any(flows)
        except OSError as error:  # whoever uses the local socket sees its end
            log.debug("a TLS connection between ranks ends: %s", error)


def _await_any(flows: list[_Flow]) -> None:
    """Returns when one of the flows can go on."""
    wanted: defaultdict[socket.socket, int] = defaultdict(int)
    for flow in flows:
        if flow.waits is not None:
            wanted[flow.waits[0]] |= flow.waits[1]
    if wanted:
        poller = select.poll()
        for sock, events in wanted.items():
            poller.register(sock, events)
        poller.poll()
