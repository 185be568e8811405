"""uvicorn's HTTP/1.1 protocol with limits on sizes and times; bytes are counted before the parser sees them.

Knows nothing of endpoints, except the few that a connection beyond the limits may use. A head over its limits is
answered 431 (414 for its URL); one that doesn't arrive in time, or a body that is too slow, 408 (RFC 9110, RFC
6585). HTTP/1.1 without exactly one valid Host is answered 400 (RFC 9112, 3.2). A request to change the protocol
(``Upgrade: h2c``, ``websocket``) is answered in HTTP/1.1 as if it weren't there (RFC 9110, 7.8). A running answer
is never cut off: the connection is only not read any more.
"""

from __future__ import annotations

import logging
import re

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.router.api.errors import plain_error
from baton.router.edge.connection_table import ConnectionEntry, ConnectionTable, Phase

SLICE = 32 << 10  # bytes fed to the parser at once: by so much at most is a head noticed too late
PIPELINED = 32  # requests that may wait for the answer before theirs; no client of ours sends a second one early
LINGER_S = 2.0  # a client may read its refusal for so long while it still sends,
LINGER_BYTES = 4 << 20  # so much at most
PROBED = frozenset({"/health", "/ready", "/metrics", "/version"})
VERSIONS = frozenset({"1.0", "1.1"})
# RFC 3986: an IPv6 literal or a registered name, which may be empty, and a port.
HOST = re.compile(rb"(\[[0-9A-Za-z:.]+\]|[-\w.~%!$&'()*+,;=]*)(:[0-9]*)?", re.ASCII)
HOP = frozenset({b"connection", b"upgrade", b"http2-settings"})  # headers that ask to change the protocol
log = logging.getLogger("baton.router.edge")


class BoundedHttp(HttpToolsProtocol):
    """Serves one REST connection, and ends it when a limit is exceeded or ``look`` finds it too slow.

    ``phase`` says what the connection is doing, ``since`` when that began, on the table's clock.
    """

    def __init__(
        self,
        connections: ConnectionTable,
        entry: ConnectionEntry,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._connections, self._entry, self._limits = connections, entry, connections.limits
        self.phase, self.since = Phase.FRESH, connections.clock()
        self._head = self._count = self._quiet = self._body = 0
        self._whole = True  # no request is half here
        self._trailing = False  # what comes like a header now is a trailer
        self._declined = False  # the parser stops behind this head, which asks to change the protocol
        self._hosts: list[bytes] = []
        self._refusal: tuple[int, str, str] | None = None

    # ---- what comes in -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Feeds received bytes to the parser, in slices, until a limit is exceeded."""
        if self._refusal is not None:
            self._linger(len(data))
            return
        if self.phase in (Phase.FRESH, Phase.IDLE):
            self._turn(Phase.HEAD)
        view = memoryview(data)
        for at in range(0, len(data), SLICE):
            if self.transport.is_closing():
                return
            part = view[at : at + SLICE]
            self._quiet += len(part)
            self._feed(part)
            if self._head + self._quiet > self._limits.max_header_bytes:
                self._too_large()
            if len(self.pipeline) > PIPELINED:
                self._refusal = (400, "pipelined", f"over {PIPELINED} requests wait for the one before them")
            if self._refusal is not None:
                self._refuse()
                return

    def _feed(self, data: memoryview | bytes) -> None:
        """Feeds the parser. A head that asks to change the protocol is fed again without that, because the parser
        leaves out the body behind such a head.
        """
        self._unset_keepalive_if_required()
        rest = [data]
        while rest:
            part = rest.pop()
            try:
                self.parser.feed_data(part)
            except HttpParserUpgrade as stopped:
                behind = part[stopped.args[0] :]
                if self._declined and self._refusal is None:
                    rest += [behind, self._plain_head()] if behind else [self._plain_head()]
                    self.parser = HttpRequestParser(self)  # the other one is done if the head says "close"
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                self._declined = False
            except HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def _plain_head(self) -> bytes:
        """Returns the head that the parser stopped behind, without its request to change the protocol."""
        version = self.parser.get_http_version().encode()
        kept = [(name, value) for name, value in self.headers if name not in HOP]
        said = b",".join(value for name, value in self.headers if name == b"connection").split(b",")
        if options := [token for token in said if token.strip().lower() not in HOP]:
            kept.append((b"connection", b",".join(options)))
        lines = [b"%s: %s\r\n" % pair for pair in kept]
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(lines))

    def _linger(self, size: int) -> None:
        """Throws away what comes after a refusal."""
        self._quiet += size
        if self._quiet > LINGER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Resets the counts when a request's first byte arrives."""
        super().on_message_begin()
        self._head = self._count = self._quiet = self._body = 0
        self._whole = self._trailing = False
        self._hosts.clear()

    def on_url(self, url: bytes) -> None:
        """Counts a part of the URL's bytes, and refuses one that is too long with 414."""
        super().on_url(url)
        self._add(len(url))
        if len(self.url) > self._limits.max_url_bytes and self._refusal is None:
            text = f"the URL is over {self._limits.max_url_bytes} bytes: shorten it, or raise router.max_url_bytes"
            self._refusal = (414, "url_too_long", text)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header, or a trailer after the body, and refuses too many or too large ones with 431.

        A trailer isn't passed on: it is no header (RFC 9110, 6.5.1).
        """
        if not self._trailing:
            super().on_header(name, value)
            if name.lower() == b"host":
                self._hosts.append(value.strip(b" \t"))  # white space around it is allowed (RFC 9112, 5)
        self._add(len(name) + len(value) + 4)
        self._count += 1
        if self._count > self._limits.max_headers or self._head > self._limits.max_header_bytes:
            self._too_large()

    def on_headers_complete(self) -> None:
        """Starts handling the request, unless it is refused or comes once more (``_feed``)."""
        self._quiet, self._trailing = 0, True
        self._declined = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._declined:
            return
        self._check_head()
        if self._refusal is not None:
            return
        self._turn(Phase.BODY)
        super().on_headers_complete()
        if self._entry.spare:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Counts a part of the body, and passes it on unless the request is refused."""
        self._quiet = 0
        self._body += len(body)
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Notes that the whole request has arrived."""
        if self._declined:
            return
        self._quiet, self._whole = 0, True
        if self._refusal is not None:
            return
        super().on_message_complete()
        self._turn(Phase.IDLE if self.cycle.response_complete else Phase.ANSWER)

    def send_400_response(self, msg: str) -> None:
        """Has the request refused with status 400, because its bytes are not valid HTTP."""
        self._refusal = self._refusal or (400, "bad_http", msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        crowded = self._entry.spare and cycle.scope["path"] not in PROBED
        super()._start_asgi_task(cycle, _crowded if crowded else app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        """Notes that the response is sent, and closes a connection whose later bytes were refused."""
        super().on_response_complete()
        if self._refusal is not None:
            self.transport.close()
        elif not self._whole:
            self._turn(Phase.HEAD if self.phase is Phase.HEAD else Phase.ENDING)
        elif not self.pipeline:
            self._turn(Phase.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the closed connection from the table."""
        self._connections.leave(self._entry)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    # ---- who is closed -------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Closes the connection, with 408 where a request has begun, if at time ``now`` it is too slow."""
        lasted, patience = now - self.since, self._limits.header_timeout_s
        if self._refusal is not None:
            if lasted > LINGER_S and not self._waiting_for_earlier():
                self.transport.close()
        elif self.phase in (Phase.FRESH, Phase.ENDING):
            if lasted > patience:
                self.transport.close()
        elif self.phase is Phase.HEAD:
            if lasted > patience:
                self._late("request_timeout", f"no whole request head came within {patience:g} s")
        elif self.phase is Phase.BODY:
            self._look_at_body(lasted, patience)

    def drop(self) -> None:
        """Closes the connection now, without a response."""
        self.transport.abort()

    def _look_at_body(self, lasted: float, patience: float) -> None:
        if self.flow.read_paused:  # we read no more: that is not the client's fault
            self.since, self._body = self._connections.clock(), 0
        elif lasted > patience and self._body < self._limits.min_body_rate * lasted:
            rate = self._limits.min_body_rate
            self._late("body_too_slow", f"the body came at under {rate:g} bytes a second: see router.min_body_rate")

    def _late(self, code: str, text: str) -> None:
        self._refusal = (408, code, text)
        self._refuse()

    # ---- refusals ------------------------------------------------------------------------------------

    def _add(self, size: int) -> None:
        self._quiet = 0
        self._head += size

    def _turn(self, phase: Phase) -> None:
        self.phase, self.since = phase, self._connections.clock()

    def _check_head(self) -> None:
        """Refuses a version that isn't spoken, and a Host that is missing, repeated or no host."""
        version, hosts = self.parser.get_http_version(), self._hosts
        if version not in VERSIONS:
            text = f"HTTP/{version} is not served here: use HTTP/1.1"
            self._refusal = self._refusal or (505, "http_version", text)
        elif len(hosts) > 1 or (version == "1.1" and not hosts):
            said = f"{len(hosts)} Host headers" if hosts else "no Host header"
            self._refusal = self._refusal or (400, "bad_host", f"the request has {said}: send one (RFC 9112, 3.2)")
        elif hosts and not HOST.fullmatch(hosts[0]):
            text = f"the Host header names no host: {hosts[0][:200]!r}"
            self._refusal = self._refusal or (400, "bad_host", text)

    def _too_large(self) -> None:
        limits = self._limits
        text = (
            f"the request's head is over {limits.max_header_bytes} bytes or {limits.max_headers} headers: send less"
            ", or raise router.max_header_bytes or router.max_headers"
        )
        self._refusal = self._refusal or (431, "headers_too_large", text)

    def _refuse(self) -> None:
        """Say why, then read on for a moment without looking: a close with bytes unread would tear the answer."""
        assert self._refusal is not None
        status, code, text = self._refusal
        self.pipeline.clear()
        self._quiet = 0
        self.since = self._connections.clock()
        if self._waiting_for_earlier():
            return  # its answer goes out, then ``on_response_complete`` closes
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        response = plain_error(status, text, code, {"connection": "close"})
        head = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
        self.transport.write(b"".join((STATUS_LINE[status], head, b"\r\n", bytes(response.body))))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _waiting_for_earlier(self) -> bool:
        """Returns whether an answer is under way, or a whole request waits for one: neither is what is refused."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body)


async def _crowded(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers everything beyond the limits, but for PROBED."""
    text = "too many connections (router.max_connections, router.max_connections_per_address): try again later"
    headers = {"retry-after": "1", "connection": "close"}
    await plain_error(503, text, "too_many_connections", headers)(scope, receive, send)
