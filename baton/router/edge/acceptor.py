"""Accepts REST's connections: each is entered in the connection table first; while file descriptors lack, it
pauses.

Knows nothing of HTTP. An accept that fails for want of descriptors leaves the connection in the kernel's queue and
the listener readable: without a pause the loop would spin. Open connections are served meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from baton.router.edge.connection_table import ConnectionEntry, ConnectionTable

AT_ONCE = 64  # accepts in a row before others get a turn
REST_S = 0.25  # seconds without accepting, after descriptors ran out
QUIET_S = 60.0  # without such a failure, until one is told again
FREED = 8  # connections that nobody waits for are closed at once where descriptors lack
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
log = logging.getLogger("baton.router.edge")


class Acceptor:
    """Accepts connections on ``listener`` until ``close``; has the methods that uvicorn expects of an asyncio
    server.
    """

    def __init__(
        self,
        listener: socket.socket,
        connections: ConnectionTable,
        protocol: Callable[[ConnectionEntry], asyncio.Protocol],
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener, self._connections, self._protocol, self._context = listener, connections, protocol, context
        self._beginning: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closed, self._complained = False, float("-inf")
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)
        self._look()

    def close(self) -> None:
        """Stops accepting; open connections stay."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener.fileno())

    async def wait_closed(self) -> None:
        """Cancels the timers and the connections that are in their handshake; uvicorn waits for open connections
        itself.
        """
        for timer in self._timers.values():
            timer.cancel()
        for task in list(self._beginning):
            task.cancel()
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._rest(error)
                return
            self._welcome(sock, address[0] if isinstance(address, tuple) else "")

    def _welcome(self, sock: socket.socket, host: str) -> None:
        entry = self._connections.enter(host)
        if entry is None:
            sock.close()
            return
        sock.setblocking(False)
        task = self._loop.create_task(self._begin(sock, entry))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _begin(self, sock: socket.socket, entry: ConnectionEntry) -> None:
        patience = self._connections.limits.header_timeout_s if self._context else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(entry), sock, ssl=self._context, ssl_handshake_timeout=patience
            )
        except (OSError, asyncio.CancelledError) as error:  # SSLError is one
            log.debug("a connection ended as it began: %s", error)
            self._connections.leave(entry)
            sock.close()
        except BaseException:
            self._connections.leave(entry)
            sock.close()
            raise

    def _rest(self, error: OSError) -> None:
        """Stop looking for a moment; where it is descriptors that lack, those who only hold one give it back."""
        if self._loop.time() - self._complained > QUIET_S:
            remedy = ", raise `ulimit -n`" if error.errno == errno.EMFILE else ""
            text = "no connection can be accepted: %s%s; trying again every %g s"
            log.warning(text, error.strerror, remedy, REST_S)
        self._complained = self._loop.time()
        if error.errno in SCARCE:
            self._connections.make_room(FREED)
        if not self._closed:
            self._loop.remove_reader(self._listener.fileno())
            self._timers["rest"] = self._loop.call_later(REST_S, self._resume)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _look(self) -> None:
        """See who is too slow, again and again."""
        pause = min(1.0, self._connections.limits.header_timeout_s / 4)
        self._timers["look"] = self._loop.call_later(pause, self._look)  # first: a look that fails is not the last
        self._connections.look()
