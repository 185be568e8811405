"""The shared tier in a bucket: a real S3 server, and the same one behind a gate where things go wrong."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from baton.kv.tiers import s3, shared
from baton.kv.tiers.blobs import Entry, name_of
from baton.kv.tiers.s3 import BucketStore
from tests.kv.sharers import PAGE
from tests.kv.tiers.buckets import served_bucket
from tests.kv.tiers.shared_worker import CHAIN, MEANING, Worker
from tests.thorough import first_now

FULL = b"<Error><Code>InsufficientCapacity</Code><Message>no room is left</Message></Error>"


class Gate(ThreadingHTTPServer):
    """Passes requests on to the server at ``behind``, unless ``fault`` names what goes wrong."""

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.behind, self.fault, self.over = behind.removeprefix("http://"), "", threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        self.over.set()
        self.shutdown()
        self.thread.join()
        self.server_close()


class Passing(BaseHTTPRequestHandler):
    """One request through the gate."""

    protocol_version = "HTTP/1.1"
    server: Gate

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault
        if fault == "hangs":
            self.server.over.wait()
        if fault in ("hangs", "breaks off"):
            self.close_connection = True
        elif fault == "full" and self.command == "PUT":
            self._say(507, {"Content-Type": "application/xml"}, FULL)
        elif fault == "nonsense":
            self._say(200, {"Content-Type": "text/html"}, b"<html>sign in first</html>")
        else:
            self._pass_on(body, fault if self.command == "GET" else "")

    do_GET = do_HEAD = do_DELETE = do_PUT

    def _pass_on(self, body: bytes, fault: str) -> None:
        behind = http.client.HTTPConnection(self.server.behind, timeout=30)
        behind.request(self.command, self.path, body, dict(self.headers))
        answer = behind.getresponse()
        found, headers = answer.read(), dict(answer.getheaders())
        behind.close()
        if fault == "flips a bit":
            found = bytes([*found[:-1], found[-1] ^ 1])
        self._say(answer.status, headers, found, len(found) // 2 if fault == "cuts" else None)

    def _say(self, status: int, headers: dict[str, str], body: bytes, most: int | None = None) -> None:
        self.send_response(status)
        told = {"Content-Length": str(len(body))} | {k: v for k, v in headers.items() if k not in HOP_BY_HOP}
        for name, value in told.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body[:most])
        self.close_connection |= most is not None

    def log_message(self, format: str, *args: object) -> None:
        """Logs no request, because the store here is asked hundreds of times."""


HOP_BY_HOP = ("Transfer-Encoding", "Connection", "Date", "Server")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with served_bucket("blocks") as url:
        yield url


async def test_workers_share_blocks_through_a_bucket_until_it_is_gone(bucket):
    made = partial(BucketStore, "s3://blocks/cluster", bucket)
    first, second = Worker(made()), Worker(made())
    await first.share(CHAIN[:6])
    assert await second.find(CHAIN) == 6
    store = made()
    assert {entry.name for entry in store.entries()} == {name_of(MEANING, block) for block in CHAIN[:6]}
    assert all(isinstance(entry, Entry) and entry.size > PAGE for entry in store.entries())
    store.remove(name_of(MEANING, CHAIN[0]))
    assert not store.has(name_of(MEANING, CHAIN[0]))
    assert store.get(name_of(MEANING, CHAIN[0]), PAGE) is None
    assert len(store.get(name_of(MEANING, CHAIN[1]), 7) or b"") == 7
    third = Worker(BucketStore("s3://nowhere/cluster", bucket))
    await third.share(CHAIN[:2])
    assert (third.shared.stored, await third.find(CHAIN[:2])) == (0, 2)  # its own, on the device
    assert third.shared.failed > 0
    for worker in (first, second, third):
        await worker.close()


@pytest.fixture
def gate(bucket: str) -> Iterator[Gate]:
    gate = Gate(bucket)
    yield gate
    gate.stop()


FAULTS = ("hangs", "breaks off", "full", "nonsense", "flips a bit", "cuts")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a busy machine time to answer; test_shared.py has what the tier does without waiting for a client."""
    for limit in ("LOOK_S", "FIRST_READ_S", "WRITE_S"):
        monkeypatch.setattr(shared, limit, 60.0)
    monkeypatch.setattr(s3, "READ_S", 60.0)


@pytest.mark.parametrize("fault", first_now(FAULTS, 3))
async def test_a_bucket_with_a_fault_costs_a_miss_and_never_a_wrong_byte(bucket, gate, fault, monkeypatch):
    made = partial(BucketStore, f"s3://blocks/{FAULTS.index(fault)}")
    behind, fresh = Worker(made(bucket)), Worker(made(gate.url))
    if fault == "hangs":
        monkeypatch.setattr(s3, "READ_S", 0.1)
    writer, reader = Worker(made(gate.url)), Worker(made(gate.url))
    await behind.share(CHAIN[:4])
    gate.fault = fault
    await writer.share(CHAIN[4:6])
    assert await reader.find(CHAIN[:6]) == (4 if fault == "full" else 0)
    assert writer.shared.failed + reader.shared.failed + reader.shared.damaged > 0
    assert (writer.shared.stored > 0) == (fault in ("nonsense", "flips a bit", "cuts")), "GETs alone are spoilt"
    gate.fault = ""
    writer.now = 100.0
    gate.over.set()
    await writer.share(CHAIN[6:8])
    assert writer.shared.stored >= 2, "it writes on"
    last = Worker(made(bucket))
    await last.share(CHAIN[:8])  # what the fault kept away, or what was removed as damaged
    assert await fresh.find(CHAIN[:8]) == 8
    for each in (behind, fresh, writer, reader, last):
        await each.close()


async def test_a_bucket_whose_server_has_gone_costs_a_miss(bucket, gate):
    url = "s3://blocks/gone"
    first, second = (Worker(BucketStore(url, gate.url)) for _ in range(2))
    await first.share(CHAIN[:4])
    assert first.shared.stored == 4
    gate.fault = "breaks off"  # also on connections that are open
    gate.shutdown()
    gate.server_close()
    assert await second.find(CHAIN[:4]) == 0
    await first.share(CHAIN[4:6])
    assert (first.shared.stored, first.shared.failed > 0, second.shared.failed > 0) == (4, True, True)
    for each in (first, second):
        await each.close()
