"""A small server that speaks OpenAI's completions, and does one thing wrong if it is told to."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Any

WORDS = "ember quartz walnut plume cobalt fennel gravel tulip".split()  # noqa: SIM905


class SmallServer:
    """Serves completions at ``url`` while it is entered; ``fault`` names what it does wrong, "" for nothing.

    The faults "cuts" and "never again" begin once ``has_lost`` says that a process of it was killed.
    """

    def __init__(self, fault: str = "") -> None:
        self.fault, self.url = fault, ""
        self.has_lost: Callable[[], bool] = lambda: False
        self._cuts = 3
        self._running = self._asked = 0
        self._last = ""

    async def __aenter__(self) -> SmallServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
            await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        size = next((int(line.split(":")[1]) for line in head.splitlines() if line.startswith("Content-Length")), 0)
        body = json.loads(await reader.readexactly(size)) if size else {}
        if path == "/v1/models":
            _send(writer, {"data": [{"id": "small"}]})
        elif path == "/health":
            _send(writer, {}, 503 if self.fault == "health" and self._asked > 2 else 200)
        elif path == "/metrics":
            held = 1 if self.fault == "held" else self._running
            lines = f'# HELP x\nnum_requests_running{{model="a b"}} {held} 1700000000\nother_running 5\n'
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + lines.encode())
        else:
            await self._complete(writer, body)

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self._running, self._asked = self._running + 1, self._asked + 1
        words = self._words(body["prompt"], body["max_tokens"])
        try:
            await asyncio.sleep(0.05 if self.fault == "health" else 0.002)  # health is looked at during the load
            if self.fault == "endless" and self._asked == 9:
                await asyncio.sleep(60)
            if body["stream"]:
                await self._stream(writer, words)
            else:
                if self.fault == "never again" and self._hurt():
                    _send(writer, {"error": {}}, 503)
                    return
                usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 1 + len(words)}
                choices = [{"index": 0, "text": "".join(words), "finish_reason": "length"}]
                _send(writer, {"choices": choices, "usage": usage})
        finally:
            self._running -= 1

    def _words(self, prompt: str, count: int) -> list[str]:
        drawn = hashlib.sha256(prompt.encode()).digest()
        words = [" " + WORDS[drawn[i % 32] % len(WORDS)] for i in range(count)]
        last, self._last = self._last, prompt.partition("word is ")[2].partition(".")[0]
        if self.fault == "foreign" and self._running > 3 and last:
            words[0] = " " + last
        if self.fault == "changes" and self._running > 3:
            words[-1] = " other"
        return words

    def _hurt(self) -> bool:
        """Returns whether a process was killed, so that this stream is cut."""
        if not self.has_lost():
            return False
        self._cuts -= 1
        return self.fault == "never again" or self._cuts >= 0

    async def _stream(self, writer: asyncio.StreamWriter, words: list[str]) -> None:
        length = b"Content-Length: 1000000\r\n" if self.fault == "breaks" else b""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + length + b"\r\n")
        told = words[:1] + words if self.fault == "repeats" else words[1:] if self.fault == "loses" else words
        for at, word in enumerate(told):
            reason = "length" if at == len(told) - 1 else None
            if at and self._hurt():
                writer.write(b'data: {"error": {"message": "a worker was lost"}}\n\n')
                return
            choice: object = {"index": 0, "text": word, "finish_reason": reason}
            if self.fault == "shapeless":
                choice = [word]
            writer.write(b"data: " + json.dumps({"choices": [choice], "error": None}).encode() + b"\n\n")
            await asyncio.sleep(0)
        writer.write(b"" if self.fault == "stops" else b"data: [DONE]\n\n")


def _send(writer: asyncio.StreamWriter, body: dict[str, Any], status: int = 200) -> None:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
