"""Serves GET /metrics: in plaintext on loopback, else over TLS to peers with a certificate of the cluster's CA.

Knows nothing of what is measured. Each connection has a thread of its own, handshake included, and limited time.
Connections are few: the oldest is closed to make room, so that scrapers which hang block nobody.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.registry import Collector

from baton.tls.identity import Identity
from baton.tls.reporting import log_refusal

PATIENCE_S = 5.0  # seconds until a peer must say something more
LASTS_S = 15.0  # seconds that a connection lasts in all
AT_ONCE = 32  # connections, of which each has a thread
REST_S = 0.25  # seconds without accepting, while there are no descriptors
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
log = logging.getLogger("baton.worker")

Request = socket.socket | tuple[bytes, socket.socket]  # as socketserver types it; a stream server's is a socket
PeerAddress = Any  # as Python's socket gives it: (host, port), for IPv6 with flow and scope


def start_metrics(
    port: int, host: str, registry: Collector, identity: Identity | None
) -> tuple[WSGIServer, threading.Thread]:
    """Starts serving ``registry`` at ``host``:``port``; returns the server and its thread.

    ``identity`` None serves plaintext. Raises OSError if the port can't be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind: type[_Server] = type("MetricsServer", (_Server,), {"address_family": family, "identity": identity})
    app = make_wsgi_app(registry)  # type: ignore[arg-type]  # it only collects
    server = make_server(host, port, app, kind, _Quiet)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread


class _Server(ThreadingMixIn, WSGIServer):
    """Accepts plain sockets; a connection's own thread makes TLS of them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    identity: Identity | None
    _complained = False

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._open: dict[socket.socket, float] = {}  # when each was accepted, in that order
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without asking a name server who we are."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "baton", self.server_address[1]  # type: ignore[misc]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, PeerAddress]:
        """Accept; without descriptors, the oldest gives his back, and we rest: the listener stays readable."""
        try:
            accepted = super().get_request()
        except OSError as error:
            if error.errno in SCARCE:
                self._make_room(0)
                if not self._complained:
                    log.warning("no scrape can be accepted: %s", error.strerror)
                self._complained = True
                time.sleep(REST_S)
            raise
        self._complained = False
        return accepted

    def process_request(self, request: Request, client_address: PeerAddress) -> None:
        """Start its thread, in the place of the oldest where all are taken."""
        assert isinstance(request, socket.socket)
        self._make_room(AT_ONCE - 1)
        with self._lock:
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End who takes too long; called twice a second."""
        before = time.monotonic() - LASTS_S
        with self._lock:
            for request in [request for request, since in self._open.items() if since < before]:
                self._end(request)

    def shutdown_request(self, request: Request) -> None:
        """Removes the connection of an answered request, and closes it."""
        with self._lock:
            self._open.pop(request, None)  # type: ignore[arg-type]  # the listener is a stream socket's
        super().shutdown_request(request)

    def finish_request(self, request: Request, client_address: PeerAddress) -> None:
        """Makes the TLS handshake, then serves the request."""
        assert isinstance(request, socket.socket)
        request.settimeout(PATIENCE_S)
        if self.identity is None:
            super().finish_request(request, client_address)
            return
        try:
            secured = self.identity.current().server.wrap_socket(request.dup(), server_side=True)
        except (ssl.SSLError, OSError) as error:
            log_refusal(self.identity.where, error, f"{client_address[0]}:{client_address[1]}")
            return
        with secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Request, client_address: PeerAddress) -> None:
        """A scraper that went away is no news."""
        log.debug("a scrape from %s broke", client_address, exc_info=True)

    def _make_room(self, most: int) -> None:
        with self._lock:
            while len(self._open) > most:
                self._end(next(iter(self._open)))

    def _end(self, request: socket.socket) -> None:
        """Closes a connection, at which its thread wakes up."""
        self._open.pop(request, None)
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("a scraper was gone already")


class _Quiet(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: object) -> None:
        """Drops a log line of the HTTP server, which would write one per scrape."""
