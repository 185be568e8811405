"""A minimal HTTP/1.1 client: one request per connection, JSON or server-sent events back, which may be left midway.

Knows nothing of what is asked. Each request has its own connection, so that closing it midway cannot disturb
another request.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec

from baton.protos.json import Json

CONNECT_S = 10.0  # seconds that a server has to accept a connection
MOST_LINE = 1 << 20  # bytes of a line: a chunk of a stream, or a header


# Errors by which a connection shows that it broke.
BROKEN = (OSError, EOFError, asyncio.LimitOverrunError)


class Unreachable(Exception):
    """Raised if the server accepts no connection, breaks it, or doesn't answer in HTTP."""


class HttpReply(msgspec.Struct):
    """A complete response: its status, and its JSON body, which is {} if it isn't JSON."""

    status: int
    body: Json


class Http:
    """Sends requests to one server. ``url`` is its root, ``key`` a bearer token or ""."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._root, self._key = parts.path.rstrip("/"), key

    async def ask(self, path: str, body: Json | None = None) -> HttpReply:
        """Returns the complete response to a GET, or to a POST of ``body`` as JSON. Raises Unreachable.

        A JSON body that is no object comes as {"data": body}.
        """
        async with self._asked(path, body) as (status, parts):
            data = b"".join([part async for part in parts])
        try:
            found = json.loads(data)
        except ValueError:
            found = {}
        return HttpReply(status, found if isinstance(found, dict) else {"data": found})

    async def text(self, path: str) -> tuple[int, str]:
        """Returns the status and the decoded body of a GET. Raises Unreachable."""
        async with self._asked(path, None) as (status, parts):
            return status, b"".join([part async for part in parts]).decode(errors="replace")

    @asynccontextmanager
    async def events(self, path: str, body: Json) -> AsyncIterator[tuple[int, AsyncIterator[str]]]:
        """Yields the status and an iterator over the data of the server-sent events that a POST of ``body``
        returns.

        Leaving the block closes the connection. Raises Unreachable.
        """
        async with self._asked(path, body) as (status, parts):
            yield status, _events(parts)

    @asynccontextmanager
    async def _asked(self, path: str, body: Json | None) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        try:
            async with asyncio.timeout(CONNECT_S):
                context = ssl.create_default_context() if self._tls else None
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context, limit=MOST_LINE)
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"no connection to {self._host}:{self._port}: {error}") from None
        try:
            writer.write(self._request(path, body))
            await writer.drain()
            try:
                status, headers = await _head(reader)
            except (ValueError, IndexError) as error:
                raise Unreachable(f"{path}: this is no HTTP: {error!r}") from None
            yield status, _body(reader, headers)
        except BROKEN as error:
            raise Unreachable(f"{path}: the connection broke: {error!r}") from None
        finally:
            writer.close()

    def _request(self, path: str, body: Json | None) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{'GET' if body is None else 'POST'} {self._root}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
        ]
        lines += ["Connection: close", "Content-Type: application/json", f"Content-Length: {len(data)}"]
        lines += [f"Authorization: Bearer {self._key}"] if self._key else []
        return "\r\n".join([*lines, "", ""]).encode() + data


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = (await reader.readuntil(b"\r\n")).decode("latin-1").split(" ", 2)
    headers: dict[str, str] = {}
    while (line := (await reader.readuntil(b"\r\n")).decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return int(first[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", ""):
        while (size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)) > 0:
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while data := await reader.read(1 << 16):
            yield data


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    left = b""
    async for part in parts:
        left += part
        while b"\n" in left:
            line, left = left.split(b"\n", 1)
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
