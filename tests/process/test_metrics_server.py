"""The metrics port before scrapers that hang."""

import contextlib
import errno
import itertools
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from baton.process import metrics_server


@contextlib.contextmanager
def serving() -> Iterator[int]:
    registry = CollectorRegistry()
    Gauge("pages", "of KV", registry=registry).set(7)
    server, thread = metrics_server.start_metrics(0, "127.0.0.1", registry, None)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        return response.read().decode()


def test_silent_scrapers_take_a_bounded_number_of_threads_and_a_good_one_gets_through() -> None:
    before = threading.active_count()
    with serving() as port:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * metrics_server.AT_ONCE)]
        assert "pages 7.0" in scrape(port)
        assert threading.active_count() - before <= metrics_server.AT_ONCE + 8  # some are on their way out
        assert silent[0].recv(1) == b""
        for one in silent:
            one.close()


def test_a_scraper_that_drips_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "LASTS_S", 0.1)
    with serving() as port, socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nx-a: ")
        with contextlib.suppress(ConnectionResetError):  # where nothing of it was read before
            assert slow.recv(1) == b""


def test_without_descriptors_the_port_rests_between_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []
    accept = metrics_server.WSGIServer.get_request

    def poor(self):
        tries.append(time.monotonic())
        if len(tries) < 4:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(metrics_server.WSGIServer, "get_request", poor)
    monkeypatch.setattr(metrics_server, "REST_S", 0.02)
    with serving() as port:
        assert "pages 7.0" in scrape(port)
    assert len(tries) == 4
    assert all(b - a >= 0.02 for a, b in itertools.pairwise(tries))
