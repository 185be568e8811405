"""GET /metrics over TLS, for whoever shows a certificate of the cluster's CA.

Knows nothing of what is measured. Each connection has a thread of its own, handshake included: a scraper that hangs
holds up nobody.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app, start_http_server
from prometheus_client.registry import Collector

from baton.tls.identity import Identity
from baton.tls.reporting import complain

PATIENCE_S = 5.0


def start_metrics(
    port: int, host: str, registry: Collector, identity: Identity | None
) -> tuple[Any, threading.Thread]:
    """The server (with ``server_port``, ``shutdown`` and ``server_close``) and its thread. Raises OSError."""
    if identity is None:
        return start_http_server(port, host, registry)  # type: ignore[arg-type]  # it only collects
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = type("MetricsServer", (_Server,), {"address_family": family, "identity": identity})
    app = make_wsgi_app(registry)  # type: ignore[arg-type]
    server: Any = make_server(host, port, app, kind, _Quiet)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread


class _Server(ThreadingMixIn, WSGIServer):
    """Accepts plain sockets; a connection's own thread makes TLS of them."""

    daemon_threads = True
    identity: Identity

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands, then serve one request after the other."""
        request.settimeout(PATIENCE_S)
        try:
            secured = self.identity.current().server.wrap_socket(request, server_side=True)
        except (ssl.SSLError, OSError) as error:
            complain(self.identity.where, error, f"{client_address[0]}:{client_address[1]}")
            return
        with secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that went away is no news."""
        logging.getLogger("baton.worker").debug("a scrape from %s broke", client_address, exc_info=True)


class _Quiet(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
