"""Server-sent events over ASGI (WHATWG HTML, section 9.2): one ``data:`` line per JSON object.

Knows nothing of what is sent; it tells the sender when the client has gone.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable

import msgspec
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.protos.errors import BatonError, Cancelled
from baton.protos.json import Json
from baton.router.api.disconnect import until_disconnect
from baton.router.api.errors import error_json
from baton.router.api.large import offloaded, sliced_json

DONE = b"data: [DONE]\n\n"
log = logging.getLogger(__name__)


def event_bytes(event: Json) -> bytes:
    """Returns one server-sent event of a ``data:`` line with ``event`` as JSON."""
    return b"data: " + orjson.dumps(event) + b"\n\n"


def named_event_bytes(event: Json) -> bytes:
    """Returns one server-sent event named by ``event["type"]``, as the Responses API writes them."""
    return b"event: " + event["type"].encode() + b"\n" + event_bytes(event)


def large_event_bytes(event: Json) -> bytes:
    """Returns what ``event_bytes`` does, made slice by slice, so that other threads get on."""
    return b"".join((b"data: ", *sliced_json(event), b"\n\n"))


def large_named_event_bytes(event: Json) -> bytes:
    """Returns what ``named_event_bytes`` does, made slice by slice."""
    return b"event: " + event["type"].encode() + b"\n" + large_event_bytes(event)


class EventStyle(msgspec.Struct, frozen=True):
    """Says how one API writes events: an event as bytes, an error as an event, and the bytes after the last
    event.

    An event that ``is_large`` is encoded by ``encode_large`` in a thread, slice by slice.
    """

    encode: Callable[[Json], bytes]
    error: Callable[[BaseException], Json]
    done: bytes
    is_large: Callable[[Json], bool] = lambda event: False
    encode_large: Callable[[Json], bytes] = large_event_bytes


class EventStream(Response):
    """Sends ``events`` until they end or the client disconnects; then calls ``close`` once, also after an error.

    An error after the first byte can't change the HTTP status: it is sent as the last event, and no [DONE] follows.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[Json],
        close: Callable[[], None],
        headers: dict[str, str],
        style: EventStyle | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._style = style or OPENAI_EVENTS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response as an ASGI application."""
        try:
            await until_disconnect(receive, self._send_all(send))
        except Cancelled:
            log.debug("client went away in the middle of a stream")
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        style = self._style
        try:
            async for event in self._events:
                large = style.is_large(event)
                body = await offloaded(style.encode_large, event) if large else style.encode(event)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await _send(send, self._style.done)
        except Exception as error:
            if not isinstance(error, BatonError):
                log.exception("a stream failed")
            await _send(send, self._style.encode(self._style.error(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


OPENAI_EVENTS = EventStyle(event_bytes, error_json, DONE)


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
