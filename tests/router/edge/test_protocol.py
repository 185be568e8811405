"""REST's connections over real sockets: what is too much or too slow is refused with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.types import Receive, Scope, Send

from baton.cluster.config import RouterConfig
from baton.router import server
from baton.router.api.errors import json_response
from baton.router.edge import connection_table as connections

Ask = Callable[..., object]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Says how long the body was, /headers which headers came; /early answers without reading it."""
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    answer: object = {"path": scope["path"], "size": size}
    if scope["path"] == "/headers":
        answer = [name.decode() for name, _ in scope["headers"]]
    await json_response(answer)(scope, receive, send)


class Line:
    """Speaks over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def status(self) -> int:
        """Returns the status of the next answer; 0 if the connection is closed without one."""
        async with asyncio.timeout(30):
            head = await self.reader.readuntil(b"\r\n\r\n") if not self.reader.at_eof() else b""
            size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            self.body = await self.reader.readexactly(size)
        return int(head.split()[1])

    async def closed(self) -> bool:
        """Once the server has closed it, with nothing more said."""
        async with asyncio.timeout(30):
            return await self.reader.read() == b""


@asynccontextmanager
async def listening(**settings: object) -> AsyncIterator[Callable[[], object]]:
    config = RouterConfig(host="127.0.0.1", port=0, shutdown_grace_s=0.0, **settings)
    port, stop = await server._start_rest(config, app, None)
    lines: list[Line] = []

    async def connect() -> Line:
        lines.append(Line(*await asyncio.open_connection("127.0.0.1", port)))
        return lines[-1]

    try:
        yield connect
    finally:
        for line in lines:
            line.writer.close()
        await stop()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"x-a: " + b"a" * 2000 + b"\r\n", 431),
        (b"x-a: 1\r\n" * 40, 431),
        (b"x-a: " + b"a" * 500_000, 431),
        (b"x-a: 1\r\n" * 5, 200),
    ],
)
async def test_heads_are_bounded_in_bytes_and_in_count(sent: bytes, status: int) -> None:
    async with listening(max_header_bytes=1024, max_headers=32) as connect:
        line = await connect()
        await line.say(b"GET / HTTP/1.1\r\nhost: x\r\n" + sent + b"\r\n")
        assert await line.status() == status


async def test_a_head_without_end_is_refused_long_before_its_sender_has_done() -> None:
    async with listening() as connect:
        line = await connect()
        await line.say(b"GET / HTTP/1.1\r\nhost: x\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 300 << 20:
                await line.say(b"x-a: " + b"b" * 60_000 + b"\r\n")
                sent += 60_000
        assert sent < 100 << 20


async def test_an_endless_url_is_refused_by_name() -> None:
    async with listening(max_url_bytes=300) as connect:
        line = await connect()
        await line.say(b"GET /" + b"a" * 1000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await line.status() == 414
        assert b"router.max_url_bytes" in line.body


@pytest.mark.parametrize(
    ("line", "hosts", "status"),
    [
        (b"GET / HTTP/1.1", (), 400),
        (b"GET / HTTP/1.1", (b"a", b"a"), 400),
        (b"GET / HTTP/1.0", (b"a", b"b"), 400),
        (b"GET / HTTP/1.1", (b"a b",), 400),
        (b"GET / HTTP/1.1", (b"a/b",), 400),
        (b"GET / HTTP/1.1", (b"user@a",), 400),
        (b"GET / HTTP/1.1", (b"\xc3\xa9",), 400),
        (b"GET / HTTP/1.1", (b"a:80:80",), 400),
        (b"GET / HTTP/2.0", (b"a",), 505),
        (b"GET /", (), 505),
        (b"GET / HTTP/1.0", (), 200),
        (b"GET / HTTP/1.1", (b"",), 200),
        (b"GET / HTTP/1.1", (b" a:80 \t",), 200),
        (b"GET / HTTP/1.1", (b"[::1]:8000",), 200),
        (b"GET / HTTP/1.1", (b"some_host.example:8000",), 200),
        (b"GET / HTTP/1.1", (b"127.0.0.1:8000",), 200),
    ],
)
async def test_a_request_names_one_host(line: bytes, hosts: tuple[bytes, ...], status: int) -> None:
    async with listening() as connect:
        asked = await connect()
        await asked.say(line + b"\r\n" + b"".join(b"Host: " + host + b"\r\n" for host in hosts) + b"\r\n")
        assert await asked.status() == status


async def test_a_trailer_is_no_header() -> None:
    async with listening() as connect:
        line = await connect()
        head = b"POST /headers HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        await line.say(head + b"2\r\nab\r\n0\r\nauthorization: Bearer b\r\nhost: y\r\n\r\n")
        assert await line.status() == 200
        assert json.loads(line.body) == ["host", "transfer-encoding"]


async def test_trailers_count_as_headers() -> None:
    async with listening(max_header_bytes=1024) as connect:
        line = await connect()
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n"
        await line.say(head + b"x-a: " + b"a" * 200_000)
        assert await line.status() == 431


async def test_a_head_that_does_not_come_is_408_and_a_silent_connection_is_closed() -> None:
    async with listening(header_timeout_s=0.5) as connect:
        half = await connect()
        await half.say(b"GET / HTTP/1.1\r\nhost:")
        silent = await connect()
        assert await half.status() == 408
        assert await half.closed()
        assert await silent.closed()


async def test_a_body_that_trickles_is_408_and_its_application_hears_of_it() -> None:
    async with listening(header_timeout_s=0.5, min_body_rate=1e6) as connect:
        line = await connect()
        await line.say(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc")
        assert await line.status() == 408
        assert b"min_body_rate" in line.body
        assert await line.closed()


async def test_an_idle_connection_is_closed_after_its_time_and_not_before_it_is_used_again() -> None:
    async with listening(keep_alive_s=1.0, header_timeout_s=30) as connect:
        line = await connect()
        for _ in range(2):
            await line.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await line.status() == 200
        assert await line.closed()


async def test_who_was_answered_early_and_sends_no_end_is_closed() -> None:
    async with listening(header_timeout_s=0.5) as connect:
        line = await connect()
        await line.say(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc")
        assert await line.status() == 200
        assert await line.closed()


async def test_a_request_behind_an_answer_under_way_is_answered_after_it() -> None:
    async with listening() as connect:
        line = await connect()
        await line.say(
            b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabcGET /b HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        assert (await line.status(), line.body) == (200, b'{"path":"/a","size":3}')
        assert (await line.status(), line.body) == (200, b'{"path":"/b","size":0}')


async def test_requests_piled_up_on_one_connection_end_it() -> None:
    async with listening() as connect:
        line = await connect()
        await line.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 5000)
        answers = bytearray()
        with contextlib.suppress(ConnectionError):  # the rest of them lay unread
            async with asyncio.timeout(30):
                while some := await line.reader.read(1 << 16):
                    answers += some
        assert answers.count(b"HTTP/1.1") < 1000


async def test_beyond_the_limit_health_is_answered_and_everything_else_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "SPARE", 2)
    async with listening(max_connections=2) as connect:
        held = [await connect() for _ in range(2)]
        for line in held:
            await line.say(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\na")
        for _ in range(6):
            await connect()  # silent ones: the oldest gives its place to a newcomer
        probe, other = await connect(), await connect()
        await probe.say(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await other.say(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await probe.status() == 200
        assert await other.status() == 503
        assert b"max_connections" in other.body
        for line in held:
            await line.say(b"bc")
            assert await line.status() == 200


async def test_an_idle_connection_makes_room_for_a_newcomer() -> None:
    async with listening(max_connections=2) as connect:
        idle, busy = await connect(), await connect()
        await idle.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await idle.status() == 200
        await busy.say(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\na")
        newcomer = await connect()
        await newcomer.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await newcomer.status() == 200
        await busy.say(b"bc")
        assert await busy.status() == 200


async def test_one_address_has_its_share_and_no_more() -> None:
    async with listening(max_connections_per_address=1) as connect:
        first, second = await connect(), await connect()
        await first.say(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\na")
        await second.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await second.status() == 503
        await first.say(b"bc")
        assert await first.status() == 200


@pytest.mark.parametrize("wanted", [b"h2c", b"websocket"])
@pytest.mark.parametrize("pieces", [1, 2, 50])
async def test_who_asks_for_another_protocol_is_answered_in_this_one(
    wanted: bytes, pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Java's own client asks for HTTP/2 so on every call; the parser would leave out the body."""
    asks = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + wanted + b"\r\nHTTP2-Settings: AAMA\r\n"
    head = b"POST /%s HTTP/1.1\r\nhost: x\r\n%scontent-length: 5\r\n\r\nhello"
    chunked = (
        b"POST /chunked HTTP/1.1\r\nhost: x\r\n" + asks + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    )
    last = b"GET /headers HTTP/1.1\r\nhost: x\r\n" + asks + b"\r\n"
    sent = head % (b"first", asks) + head % (b"second", b"") + head % (b"third", asks) + chunked + last
    async with listening() as connect:
        line = await connect()
        step = -(-len(sent) // pieces)
        for at in range(0, len(sent), step):
            await line.say(sent[at : at + step])
            await asyncio.sleep(0.001)
        for path, size in (("/first", 5), ("/second", 5), ("/third", 5), ("/chunked", 2)):
            assert await line.status() == 200
            assert json.loads(line.body) == {"path": path, "size": size}
        assert await line.status() == 200
        assert json.loads(line.body) == ["host"]
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == []


async def test_a_tunnel_is_not_dug_and_an_upgrade_may_close_its_connection() -> None:
    async with listening() as connect:
        line = await connect()
        await line.say(b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n")
        assert await line.status() == 400
        line = await connect()
        asks = b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n"
        await line.say(b"GET / HTTP/1.1\r\nhost: x\r\n" + asks + b"\r\n")
        assert await line.status() == 200
        assert await line.closed()


async def test_what_is_no_http_hears_so() -> None:
    async with listening() as connect:
        line = await connect()
        await line.say(b"\x16\x03\x01\x02 hello\r\n\r\n")
        assert await line.status() == 400
        assert b"bad_http" in line.body
