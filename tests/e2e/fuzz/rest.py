"""Fuzzes HTTP: asks every operation of a router's OpenAPI document oddly, over sockets that are kept alive."""

from __future__ import annotations

import asyncio
import random
import re
import urllib.parse
from typing import Any, NamedTuple

from tests.e2e.fuzz.values import DOCUMENTS, TEXTS, damaged, encoded, junk, shaped

ANSWER_S = 60.0
GOOD: dict[str, Any] = {
    "prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "tokens": [5], "text_input": "x",
    "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}], "max_tokens": 2,
    "max_completion_tokens": 2, "max_output_tokens": 2,
}  # fmt: skip
MEDIA = [
    "text/plain", "application/octet-stream", "multipart/form-data", "multipart/form-data; boundary=x", "image/png",
    "application/x-www-form-urlencoded", "application/json; charset=utf-16", "application/json;;;=", "\x7f", "",
]  # fmt: skip
HEADERS: dict[str, list[str]] = {
    "authorization": ["Bearer", "Bearer " + "x" * 9000, "Basic AAAA", "bearer é", ""],
    "x-request-id": ["a" * 128, "a" * 129, "é", " ", "id\ttab", "resp_x"],
    "x-request-timeout": ["30", "1e9", "nan", "-1", "inf", "soon", ""],
    "x-slo-ttft-ms": ["60000", "nan", "-5", "1e300", "x"],
    "x-slo-tpot-ms": ["60000", "inf", "0", "x"],
    "x-session-id": ["s", "s" * 256, "s" * 257, "é"],
    "traceparent": ["00-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-zz", "x" * 5000],
    "accept": ["text/event-stream", "*/*;q=nope"],
    "accept-encoding": ["br, gzip;q=0, \x01"],
    "content-encoding": ["gzip", "br", "identity"],
    "expect": ["100-continue", "200-maybe"],
    "inference-header-content-length": ["0", "-1", "5", "999999999999", "x"],
    "range": ["bytes=0-", "bytes=9-1"],
    "transfer-encoding": ["gzip"],
    "upgrade": ["websocket", "h2c"],
    "host": ["", "[::1", "a" * 5000],
    "cookie": ["a" * 9000],
}
GARBAGE = [
    b"\x00" * 64, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    b"GET /health HTTP/1.1\r\nhost x\r\n\r\n", b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"GET http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /%zz%00%ff?%=%&&=;# HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n",
]  # fmt: skip
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW"]


class Operation(NamedTuple):
    """A method, a path with its parameters' names, and the schema of its body if it has one."""

    method: str
    path: str
    schema: Any


class Case(NamedTuple):
    """Bytes to send. ``whole``: well-formed HTTP, so an answer must come; ``leaves``: the client goes early."""

    what: str
    raw: bytes
    whole: bool = True
    leaves: bool = False


class Reply(NamedTuple):
    """Holds a reply; status 0 means that the server closed the connection without an answer."""

    status: int
    body: bytes


def operations(document: dict[str, Any], without: tuple[str, ...] = ()) -> list[Operation]:
    """Returns the operations of an OpenAPI document, less the paths that begin with one of ``without``."""
    found = []
    for path, item in document["paths"].items():
        for method, operation in item.items():
            content = operation.get("requestBody", {}).get("content", {})
            schema = next((media.get("schema") for media in content.values()), None)
            if not path.startswith(without or ("\n",)):
                found.append(Operation(method.upper(), path, schema))
    return found


def case(
    rng: random.Random, found: list[Operation], schemas: dict[str, Any], model: str, ids: tuple[str, ...] = ()
) -> Case:
    """Draws one input; ``ids`` are of files and batches that earlier answers named."""
    if rng.random() < 0.02:
        return _upload(rng)
    if ids and rng.random() < 0.02:
        body = {"input_file_id": rng.choice(ids), "endpoint": "/v1/completions", "completion_window": "24h"}
        return _said(
            rng, "POST", "/v1/batches", {"host": "x", "content-type": "application/json"}, encoded(rng, body)
        )
    if rng.random() < 0.03:
        garbage = rng.choice(GARBAGE) if rng.random() < 0.5 else rng.randbytes(rng.choice([1, 30, 3000]))
        return Case("garbage", garbage, whole=False)
    operation = rng.choice([o for o in found if o.schema] if rng.random() < 0.8 else found)
    method = operation.method if rng.random() < 0.97 else rng.choice(METHODS)
    path, headers = _path(rng, operation.path, model, ids), {"host": "x", "content-type": "application/json"}
    body = _body(rng, operation, schemas) if operation.schema or rng.random() < 0.1 else b""
    if rng.random() < 0.06:
        headers["content-type"] = rng.choice(MEDIA)
    if rng.random() < 0.15:
        for name in rng.sample(sorted(HEADERS), rng.randint(1, 3)):
            headers[name] = rng.choice(HEADERS[name])
    return _said(rng, method, path, headers, body)


def _upload(rng: random.Random) -> Case:
    """A batch's file, good or nearly."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}
    lines = [line | {"custom_id": str(i)} for i in range(rng.randint(1, 3))]
    if rng.random() < 0.5:
        rng.choice(lines)[rng.choice([*line, "odd"])] = junk(rng)
    content = b"\n".join(encoded(rng, one) for one in lines)
    part = b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    file = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n' + content + b"\r\n"
    body = part % (b"purpose", b"batch") + file + b"--b--\r\n"
    if rng.random() < 0.2:
        body = damaged(rng, body)
    return _said(rng, "POST", "/v1/files", {"host": "x", "content-type": "multipart/form-data; boundary=b"}, body)


def _path(rng: random.Random, path: str, model: str, ids: tuple[str, ...]) -> str:
    def value(match: re.Match[str]) -> str:
        if "model" in match[1] and rng.random() < 0.8:
            return urllib.parse.quote(model, safe="")
        if ids and rng.random() < 0.5:
            return rng.choice(ids)
        text = rng.choice([*TEXTS, "1", "0", "file-x", "batch_x", "%", "a/b"])[:200]
        return urllib.parse.quote(text.encode(errors="replace"), safe="" if rng.random() < 0.8 else "/%")

    path = re.sub(r"\{([^}]*)\}", value, path)
    if rng.random() < 0.05:
        path += "?" + rng.choice(
            ["limit=0", "limit=nan&after=x", "limit=99999999999999999999", "after=%ff", "a&=&==", "%"]
        )
    return path if path.isascii() and " " not in path else "/x"


def _body(rng: random.Random, operation: Operation, schemas: dict[str, Any]) -> bytes:
    if not isinstance(operation.schema, dict) or rng.random() < 0.05:
        return rng.choice(DOCUMENTS) if rng.random() < 0.8 else rng.randbytes(rng.choice([1, 50, 5000]))
    said = shaped(rng, operation.schema, schemas)
    fields = schemas.get(operation.schema.get("$ref", "").rpartition("/")[2], {}).get("properties", {})
    if isinstance(said, dict) and fields:
        if rng.random() < 0.4:  # a good one, but for a few fields
            said = {name: said[name] for name in rng.sample(sorted(said), min(len(said), rng.randrange(4)))}
        if rng.random() < 0.8:  # one that gets past the door
            said |= {name: value for name, value in GOOD.items() if name in fields}
        if rng.random() < 0.9:
            said.pop("model", None)
        for name in rng.sample(sorted(fields), min(len(fields), rng.choice([0, 0, 0, 1, 2]))):
            said[name] = junk(rng)
    raw = encoded(rng, said)
    return damaged(rng, raw) if rng.random() < 0.1 else raw


def _said(rng: random.Random, method: str, path: str, headers: dict[str, str], body: bytes) -> Case:
    what = f"{method} {path[:80]}"
    leaves = rng.random() < 0.02
    if rng.random() < 0.1 and "transfer-encoding" not in headers:
        pieces = [body[i : i + 700] for i in range(0, len(body), 700)]
        sent = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces if p) + b"0\r\n\r\n"
        return Case(what, _head(method, path, headers | {"transfer-encoding": "chunked"}) + sent, leaves=leaves)
    if rng.random() < 0.03 and body:
        cut = body[: rng.randrange(len(body))]
        return Case(f"cut {what}", _head(method, path, headers | {"content-length": str(len(body))}) + cut, False)
    is_whole = (
        not {"transfer-encoding", "upgrade", "host", "expect"} & (headers.keys() - {"host"})
        and headers["host"] == "x"
    )
    raw = _head(method, path, headers | {"content-length": str(len(body))}) + body
    return Case(what, raw, is_whole, leaves)


def _head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


class Connection:
    """One kept-alive connection, opened anew when the server or a case closed it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, asked: Case) -> Reply:
        """Send it, read the whole answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 24)
        reader, writer = self._streams
        try:
            writer.write(asked.raw)
            if not asked.whole:
                writer.write_eof()
            await writer.drain()
            if asked.leaves:
                await asyncio.sleep(0.002)
                self.close()
                return Reply(0, b"")
            async with asyncio.timeout(ANSWER_S):
                reply, stays = await _read(reader, asked.raw.startswith(b"HEAD "))
        except (ConnectionError, asyncio.IncompleteReadError):
            reply, stays = Reply(0, b""), False
        if not (stays and asked.whole):
            self.close()
        return reply

    def close(self) -> None:
        """Closes the connection at once."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _read(reader: asyncio.StreamReader, is_head: bool) -> tuple[Reply, bool]:
    """An answer, and whether the connection stays."""
    status, headers = 100, b""
    while status == 100:
        head = await reader.readuntil(b"\r\n\r\n")
        first, _, headers = head.lower().partition(b"\r\n")
        status = int(first.split()[1])
    stays = b"connection: close" not in headers
    length = re.search(rb"content-length: (\d+)", headers)
    if is_head or status in (204, 304):
        return Reply(status, b""), stays
    if length:
        return Reply(status, await reader.readexactly(int(length[1]))), stays
    if b"transfer-encoding: chunked" not in headers:
        return Reply(status, await reader.read()), False
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return Reply(status, bytes(body)), stays
