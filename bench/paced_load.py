"""A load of given arrivals on a paced cluster, each request as its own client saw it.

Knows nothing of what is measured with it. Prompts are random tokens, so that no prefix is shared.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence

import msgspec

from baton.launch.fleet import Fleet

WAIT_S = 180.0
VOCAB = 32000


class Arrival(msgspec.Struct, frozen=True):
    """One request of the load: seconds after its begin, tokens in and out; ``phase`` is the load's own label."""

    at: float
    phase: int
    prompt: int
    answer: int


class Answered(msgspec.Struct, frozen=True):
    """Holds what a client saw of its answer; ``tpot_s`` is None below two tokens, ``sent`` counts seconds from the
    load's begin.
    """

    phase: int
    ttft_s: float | None
    tpot_s: float | None
    failed: str = ""
    sent: float = 0.0


async def ask(
    fleet: Fleet, arrival: Arrival, rng: random.Random, start: float, vocab: int = VOCAB, only: Sequence[int] = ()
) -> Answered:
    """One streamed completion over a connection of its own; ``only``: token ids that the answer is made of."""
    prompt = [rng.randrange(2, vocab) for _ in range(arrival.prompt)]
    body = {"prompt": prompt, "max_tokens": arrival.answer, "ignore_eos": True, "stream": True}
    if only:
        body["allowed_token_ids"] = list(only)
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {fleet.host}\r\ncontent-type: application/json\r\n"
    since, first, last, reason = time.monotonic(), 0.0, 0.0, "no answer"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection(fleet.host, fleet.port)
            writer.write(f"{head}content-length: {len(raw)}\r\nconnection: close\r\n\r\n".encode() + raw)
            async for line in reader:
                if line.startswith(b"data: [DONE]"):
                    reason = ""
                elif line.startswith(b"data: "):
                    last = time.monotonic()
                    first = first or last
                    if b'"error"' in line:
                        reason = line.decode()[:200]
                        break
    except (OSError, TimeoutError) as error:
        reason = repr(error)
    finally:
        if writer is not None:
            writer.close()
    tpot = (last - first) / (arrival.answer - 1) if arrival.answer > 1 and first else None
    return Answered(arrival.phase, first - since if first else None, tpot, reason, since - start)


async def drive(
    fleet: Fleet,
    load: list[Arrival],
    run: str,
    tail_s: float = WAIT_S,
    vocab: int = VOCAB,
    only: Sequence[int] = (),
) -> list[Answered]:
    """Send the load when it is due. Who has no answer ``tail_s`` after the last was sent hangs up, as too late."""
    rng, start, asked = random.Random(run), time.monotonic(), []
    for arrival in load:
        await asyncio.sleep(max(0.0, start + arrival.at - time.monotonic()))
        asked.append(asyncio.create_task(ask(fleet, arrival, rng, start, vocab, only)))
    _, late = await asyncio.wait(asked, timeout=tail_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [_late(arrival) if task in late else task.result() for arrival, task in zip(load, asked, strict=True)]


def _late(arrival: Arrival) -> Answered:
    return Answered(arrival.phase, None, None, sent=arrival.at)
