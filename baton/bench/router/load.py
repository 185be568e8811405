"""HTTP/1.1 load clients over raw sockets that use little CPU, because they share the cores with the measured
router.

Knows nothing of what is measured. Each handles one response at a time, and takes times as bytes arrive.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

import msgspec

LAST_CHUNK = b"\r\n0\r\n\r\n"
TAIL = 2048  # last bytes of an answer that are kept, because its usage stands at the end


class RequestOutcome(msgspec.Struct):
    """The result of one request; seconds count from its sending."""

    status: int = 0
    ttft_s: float = 0.0  # until the first event
    total_s: float = 0.0  # until the end of the response
    tokens: int = 0  # of the answer, by the router's usage
    events: int = 0  # server-sent events with tokens
    retry_after_s: float = 0.0  # by the Retry-After header

    @property
    def good(self) -> bool:
        """Returns whether the request was answered completely."""
        return self.status == 200 and self.tokens > 0


class _ResponseReader(asyncio.Protocol):
    """Reads one response at a time."""

    def __init__(self) -> None:
        self.outcome = RequestOutcome()
        self._sent = 0.0
        self._head = b""
        self._tail = b""
        self._in_body = False
        self._left = -1
        self._over: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports derive from no class of asyncio's

    def ask(self, raw: bytes) -> asyncio.Future[None]:
        """Sends the request ``raw``; returns a future that is done when the response is complete."""
        self.outcome, self._head, self._tail, self._in_body, self._left = RequestOutcome(), b"", b"", False, -1
        self._over = asyncio.get_running_loop().create_future()
        self._sent = time.perf_counter()
        assert self.transport is not None, "requests are sent on an open connection"
        self.transport.write(raw)
        return self._over

    def close(self) -> None:
        """Closes the connection if it was opened."""
        if self.transport is not None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter() - self._sent
        if not self._in_body:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._in_body = True
            self._read_head(head)
        if data:
            self._read_body(data, now)

    def _read_head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        self.outcome.status = int(lines[0].split()[1])
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"retry-after":
                self.outcome.retry_after_s = float(value)
            elif name.lower() == b"content-length":
                self._left = int(value)

    def _read_body(self, data: bytes, now: float) -> None:
        outcome = self.outcome
        events = data.count(b"data: {")
        if events and not outcome.events:
            outcome.ttft_s = now
        outcome.events += events
        self._tail = (self._tail + data)[-TAIL:]
        self._left -= len(data)
        if self._left == 0 or self._tail.endswith(LAST_CHUNK):
            outcome.total_s = now
            outcome.tokens = _usage(self._tail)
            if self._over is not None and not self._over.done():
                self._over.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


def _usage(tail: bytes) -> int:
    at = tail.rfind(b'"completion_tokens":')
    if at < 0:
        return 0
    digits = tail[at + 20 : at + 32].lstrip()
    return int(digits[: next(i for i, c in enumerate(digits) if not 48 <= c <= 57)])


@asynccontextmanager
async def connected(host: str, port: int) -> AsyncIterator[Callable[[bytes], Awaitable[RequestOutcome]]]:
    """Opens a connection; yields a coroutine function that sends a request's bytes and returns its outcome."""
    _, reader = await asyncio.get_running_loop().create_connection(_ResponseReader, host, port)

    async def ask(raw: bytes) -> RequestOutcome:
        await reader.ask(raw)
        return reader.outcome

    try:
        yield ask
    finally:
        reader.close()


def request(prompt: str | Sequence[int], max_tokens: int, headers: str = "") -> bytes:
    """Returns the bytes of an HTTP/1.1 request for a streamed completion.

    ``headers`` are additional header lines with their line ends.
    """
    body = json.dumps(
        {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        | {"stream_options": {"include_usage": True}}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def closed_loop(
    host: str, port: int, clients: int, make: Callable[[int], bytes], count: int
) -> list[RequestOutcome]:
    """Sends ``count`` requests by ``clients`` clients, each of which sends its next one when the last is answered.

    ``make`` returns the bytes of the request with a number from 0 on. Returns the outcomes as they came.
    """
    outcomes: list[RequestOutcome] = []
    numbers = iter(range(count))

    async def client() -> None:
        async with connected(host, port) as ask:
            outcomes.extend([await ask(make(number)) for number in numbers])

    await asyncio.gather(*(client() for _ in range(clients)))
    return outcomes


async def open_loop(
    host: str, port: int, rate: float, seconds: float, make: Callable[[int], bytes], seed: int = 1
) -> list[RequestOutcome]:
    """Sends requests in a Poisson process of ``rate`` per second for ``seconds``, each on its own connection.

    ``make`` returns the bytes of the request with a number from 0 on. Returns the outcomes as they came.
    """
    rng, outcomes, tasks = random.Random(seed), [], []

    async def one(number: int) -> None:
        async with connected(host, port) as ask:
            outcomes.append(await ask(make(number)))

    end, number = time.perf_counter() + seconds, 0
    at = time.perf_counter()
    while at < end:
        at += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number)))
        number += 1
    await asyncio.gather(*tasks)
    return outcomes
