"""Clients that ask a server over HTTP, each one request after the other, and what they see. Knows no engine.

A window begins once every client has had a token, and lasts until the seconds are over and as many answers have
ended in it as there are clients, four times the seconds at most. Prompts are random tokens, so that no cache helps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from baton.launch.ports import HOST

VOCABULARY = 31000  # below the special tokens of the models that are asked
SETTLE_S, LATE = 240.0, 4  # seconds for every client's first token; a window is at most so many times its seconds
Event = tuple[float, int]  # when it came, by the monotonic clock, and how many tokens it brought
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BUSY, TRIES, AGAIN_S = (b" 429 ", b" 503 "), 30, 1.0
Ask = Callable[[list[int], int], AsyncIterator[Event]]  # a prompt's tokens and how many are wanted


class ServingLoad(msgspec.Struct, frozen=True):
    """Describes a load: how many clients ask at once, and the tokens of their prompts and answers."""

    clients: int
    prompt: int
    answer: int

    @property
    def name(self) -> str:
        """Returns how rows name it."""
        return f"{self.clients} x ({self.prompt} + {self.answer})"


LOADS = (ServingLoad(1, 512, 64), ServingLoad(8, 512, 64), ServingLoad(16, 256, 128), ServingLoad(4, 1536, 32))


class ClientTimes(msgspec.Struct):
    """Holds what clients saw within ``seconds``: tokens, seconds to first tokens and between two events."""

    seconds: float = 0.0
    tokens: int = 0
    answers: int = 0
    firsts: list[float] = []
    gaps: list[float] = []

    @property
    def rate(self) -> float:
        """Returns tokens of answers per second; at least one is counted, so that ratios stay finite."""
        return max(1, self.tokens) / self.seconds

    @property
    def first(self) -> float:
        """Returns the mean seconds to a first token; the whole window where none came."""
        return sum(self.firsts) / len(self.firsts) if self.firsts else self.seconds

    @property
    def gap(self) -> float:
        """Returns the seconds between two events that 99 of 100 keep to; the whole window where none came."""
        return sorted(self.gaps)[int(0.99 * (len(self.gaps) - 1))] if self.gaps else self.seconds


class _Window:
    """The span that counts; it opens with every client's first token."""

    def __init__(self, clients: int) -> None:
        self.seen, self.open, self.closed = ClientTimes(), asyncio.Event(), False
        self._missing, self._since = set(range(clients)), 0.0

    def heard(self, client: int) -> None:
        self._missing.discard(client)
        if not self._missing and not self.open.is_set():
            self._since = time.monotonic()
            self.open.set()

    def holds(self, *times: float) -> bool:
        return self.open.is_set() and not self.closed and all(at >= self._since for at in times)

    def close(self) -> None:
        self.closed, self.seen.seconds = True, time.monotonic() - self._since


async def run(ask: Ask, load: ServingLoad, seconds: float, seed: str) -> ClientTimes:
    """Returns what the clients of ``load`` saw. Raises RuntimeError for an answer that fails or doesn't begin."""
    window = _Window(load.clients)
    clients = [
        asyncio.create_task(_client(ask, load, number, random.Random(f"{seed} {number}"), window))
        for number in range(load.clients)
    ]
    try:
        await _unless_failed(clients, window.open.wait(), SETTLE_S)
        await _unless_failed(clients, asyncio.sleep(seconds), None)
        deadline = time.monotonic() + (LATE - 1) * seconds
        while window.seen.answers < load.clients and time.monotonic() < deadline:
            await _unless_failed(clients, asyncio.sleep(0.05), None)
        window.close()
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return window.seen


async def _unless_failed(clients: list[asyncio.Task[None]], waits: Any, most_s: float | None) -> None:
    waiting = asyncio.ensure_future(waits)
    done, _ = await asyncio.wait([waiting, *clients], timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
    if waiting not in done:
        waiting.cancel()
        failed = next((c.exception() for c in clients if c.done() and not c.cancelled()), None)
        raise RuntimeError("a request failed" if failed else f"no first token within {most_s} s") from failed


async def _client(ask: Ask, load: ServingLoad, number: int, rng: random.Random, window: _Window) -> None:
    """One answer after another until it is cancelled."""
    while True:
        prompt, since, last = [rng.randrange(VOCABULARY) for _ in range(load.prompt)], time.monotonic(), 0.0
        async with contextlib.aclosing(ask(prompt, load.answer)) as events:  # type: ignore[type-var]
            async for at, tokens in events:
                window.heard(number)
                _count(window, since, last, at, tokens)
                last = at
        if window.holds():
            window.seen.answers += 1


def _count(window: _Window, since: float, last: float, at: float, tokens: int) -> None:
    if not window.holds(at):
        return
    window.seen.tokens += tokens
    if not last and window.holds(since):
        window.seen.firsts.append(at - since)
    elif last and window.holds(last):
        window.seen.gaps.append(at - last)


# ---- over HTTP ----


def completions(port: int, model: str) -> Ask:
    """Returns what asks an OpenAI-compatible server for streamed completions."""

    async def ask(prompt: list[int], tokens: int) -> AsyncIterator[Event]:
        async for event in streamed(port, body_of(model, prompt, tokens)):
            yield event

    return ask


def body_of(model: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Returns the request that every server gets: a greedy answer of exactly ``tokens`` tokens, as token ids."""
    asked = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return asked | {"stream": True, "return_token_ids": True}


async def streamed(port: int, body: dict[str, Any], headers: str = "") -> AsyncIterator[Event]:
    """Yields the events of a streamed completion that bring tokens.

    Raises RuntimeError where it is refused or ends before ``[DONE]``: a server that died would count as a fast one.
    """
    reader, writer = await _post(port, body, headers)
    try:
        async for line in reader:
            if line.startswith(b"data: {") and (tokens := _tokens(json.loads(line[6:]))):
                yield time.monotonic(), tokens
            elif line.startswith(b"data: [DONE]"):
                return
        raise RuntimeError("the answer broke off")
    finally:
        writer.close()


async def answered(port: int, body: dict[str, Any], headers: str = "") -> dict[str, Any]:
    """Returns the whole answer to a request that doesn't stream. Raises RuntimeError where it is refused."""
    reader, writer = await _post(port, body, headers)
    try:
        length = 0
        while line := (await reader.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        found: dict[str, Any] = json.loads(await reader.readexactly(length))
        return found
    finally:
        writer.close()


async def _post(port: int, body: dict[str, Any], headers: str) -> Connection:
    """Asks again where the server says that it can't answer yet, as clients do; the time counts."""
    for _ in range(TRIES):
        reader, writer, status = await _posted(port, body, headers)
        if b" 200 " in status:
            return reader, writer
        told = await reader.read(2000)
        writer.close()
        if not any(code in status for code in BUSY):
            break
        await asyncio.sleep(AGAIN_S)
    raise RuntimeError(f"{status!r} {told!r}")


async def _posted(port: int, body: dict[str, Any], headers: str) -> tuple[*Connection, bytes]:
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n{headers}"
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(f"{head}content-length: {len(raw)}\r\nconnection: close\r\n\r\n".encode() + raw)
    return reader, writer, await reader.readline()


def _tokens(event: dict[str, Any]) -> int:
    """Returns how many tokens an event brings. Raises RuntimeError if it reports a failure."""
    if "error" in event:
        raise RuntimeError(str(event["error"]))
    return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
