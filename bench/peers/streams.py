"""Streams that decode while prompts arrive at a steady pace, as an OpenAI client sees them. Knows no engine.

Times between two events of a stream count only inside the window; an event is one token here, since both servers
send one event per token.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from baton.launch.ports import HOST

VOCABULARY = 31000
STREAM_PROMPT, STREAM_TOKENS = 128, 1024
SETTLE_S = 2.5  # until all streams decode


class Load(msgspec.Struct, frozen=True):
    """Describes a load: how many streams, how long a prompt, how often one comes, and for how long (seconds)."""

    streams: int
    prompt: int
    every: float
    seconds: float


class StreamTimes(msgspec.Struct):
    """Holds what came within ``seconds``: gaps between a stream's tokens, tokens, and times to a prompt's first
    token.
    """

    seconds: float
    prompt: int
    gaps: list[float] = []
    tokens: int = 0
    prompts: list[float] = []

    def itl(self, share: float) -> float:
        """A percentile of the gaps, seconds; the whole window where no two tokens came."""
        return sorted(self.gaps)[int(share * (len(self.gaps) - 1))] if self.gaps else self.seconds

    @property
    def rate(self) -> float:
        """Tokens that the streams wrote, per second; at least one is counted, so that ratios stay finite."""
        return max(1, self.tokens) / self.seconds

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompts that were answered, per second; at least one prompt is counted."""
        return max(1, len(self.prompts)) * self.prompt / self.seconds

    @property
    def prompt_median(self) -> float:
        """Seconds to a prompt's first token; the whole window where none was answered."""
        return sorted(self.prompts)[len(self.prompts) // 2] if self.prompts else self.seconds


async def run(port: int, load: Load, seed: str) -> StreamTimes:
    """The load on the server at ``port``; what its clients saw. Raises RuntimeError for an answer that fails."""
    rng, seen = random.Random(seed), StreamTimes(load.seconds, load.prompt)
    begin = time.monotonic() + SETTLE_S
    window = begin, begin + load.seconds
    streams = [asyncio.create_task(_stream(port, rng, window, seen)) for _ in range(load.streams)]
    prompts, at = [], window[0]
    while at < window[1]:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        prompts.append(asyncio.create_task(_prompt(port, rng, load.prompt, window, seen)))
        at += load.every
    await asyncio.sleep(max(0.0, window[1] - time.monotonic()))
    tasks = [*streams, *prompts]
    failed = [task.exception() for task in tasks if task.done() and not task.cancelled() and task.exception()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(tasks)} requests failed") from failed[0]
    return seen


async def _stream(port: int, rng: random.Random, window: tuple[float, float], seen: StreamTimes) -> None:
    """One answer after another until it is cancelled."""
    while True:
        last = 0.0
        async for now in _tokens(port, rng, STREAM_PROMPT, STREAM_TOKENS):
            if last and window[0] <= last and now <= window[1]:
                seen.gaps.append(now - last)
            seen.tokens += window[0] <= now <= window[1]
            last = now


async def _prompt(
    port: int, rng: random.Random, length: int, window: tuple[float, float], seen: StreamTimes
) -> None:
    since = time.monotonic()
    async for now in _tokens(port, rng, length, 1):
        if now <= window[1]:
            seen.prompts.append(now - since)
        return


async def _tokens(port: int, rng: random.Random, length: int, answer: int) -> AsyncIterator[float]:
    """Yields the times at which the tokens of a streamed completion come."""
    body = {
        "prompt": [rng.randrange(VOCABULARY) for _ in range(length)], "max_tokens": answer, "stream": True,
        "ignore_eos": True, "temperature": 1.0, "cache_prompt": False, "seed": rng.randrange(1 << 30),
    }  # fmt: skip
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(f"{head}content-length: {len(raw)}\r\nconnection: close\r\n\r\n".encode() + raw)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {(await reader.read(1000))!r}")
        async for line in reader:
            if line.startswith(b"data: {") and _has_token(json.loads(line[6:])):
                yield time.monotonic()
            elif line.startswith((b"data: [DONE]", b"error")):
                return
    finally:
        writer.close()


def _has_token(event: dict[str, Any]) -> bool:
    """Returns whether the event carries part of the answer. Raises RuntimeError if it reports a failure."""
    if "error" in event:
        raise RuntimeError(str(event["error"]))
    return bool(event.get("choices")) and not (
        event["choices"][0].get("finish_reason") and not event["choices"][0].get("text")
    )
