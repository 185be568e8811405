"""One request asked for twice, once in peace and once with its decode worker killed under it; what differs.

Requests come in kinds, so that every feature that a migration must carry over is surely met, on every engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import httpx

from tests.e2e.fleet import Fleet

MAX_TOKENS = 32
ROUTE = re.compile(r"decode=([\w-]+)")
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
REGEX = {"guided_regex": "[a-z0-9 ]{150,200}", "ignore_eos": False}
TEXT = {"type": "string", "minLength": 100, "maxLength": 160}
FORM = {"type": "object", "properties": {"why": TEXT}, "required": ["why"], "additionalProperties": False}
SCHEMA = {"guided_json": FORM, "ignore_eos": False}
KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "greedy": lambda rng: {"temperature": 0.0},
    "seeded": lambda rng: {"temperature": rng.choice([0.7, 1.2]), "top_p": 0.9, "top_k": rng.choice([0, 40])},
    "n>1": lambda rng: {"temperature": rng.choice([0.8, 1.2]), "n": rng.choice([2, 3])},
    "penalties, logprobs": lambda rng: (
        PENALTIES | {"temperature": rng.choice([0, 0.8]), "logprobs": rng.randrange(4)}
    ),
    "grammar": lambda rng: rng.choice([REGEX, SCHEMA]) | {"temperature": rng.choice([0.0, 0.9])},
    "grammar, n>1": lambda rng: rng.choice([REGEX, SCHEMA]) | PENALTIES | {"temperature": 1, "n": 2, "logprobs": 1},
}


def drawn(rng: random.Random, vocab: int, kind: str) -> dict[str, Any]:
    """Draws a request's body."""
    body = {
        "prompt": [rng.randrange(2, vocab) for _ in range(rng.choice([20, 130, 300]))],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        "seed": rng.randrange(1 << 30),
    }
    return body | KINDS[kind](rng)


class StreamedAnswer:
    """Collects one streamed answer: ids, text, logprobs and ends by choice, and the time of each piece."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, list[Any]]] = {}
        self.times: dict[int, list[float]] = {}
        self.usage: dict[str, Any] = {}
        self.decode = ""
        self.error: dict[str, Any] | None = None
        self.tokens = 0

    def take(self, chunk: dict[str, Any]) -> None:
        """One event of the stream."""
        self.error = chunk.get("error", self.error)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            self.times.setdefault(choice["index"], []).append(time.monotonic())
            kept = self.choices.setdefault(choice["index"], {"ids": [], "text": [], "logprobs": [], "ends": []})
            ids, logprobs = choice.get("token_ids") or [], choice.get("logprobs") or {}
            kept["ids"] += ids
            kept["text"] += choice.get("text") or ""
            kept["logprobs"] += zip(logprobs.get("tokens", []), logprobs.get("token_logprobs", []), strict=True)
            kept["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            self.tokens += len(ids)

    @property
    def answer(self) -> dict[str, Any]:
        """All that a client can compare."""
        counted = {k: self.usage.get(k) for k in ("prompt_tokens", "completion_tokens")}
        return {"choices": dict(sorted(self.choices.items())), "usage": counted, "error": self.error}

    def silence(self, since: float = 0.0) -> float:
        """The longest wait for the next piece of one choice that ended after ``since``."""
        waits = [b - a for at in self.times.values() for a, b in itertools.pairwise(at) if b > since]
        return max(waits, default=0.0)


async def ask(
    fleet: Fleet, body: dict[str, Any], after: int = 0, disturb: Callable[[str], object] | None = None
) -> StreamedAnswer:
    """Streams an answer; once ``after`` tokens have come, calls ``disturb`` with the decode worker that writes
    it.
    """
    heard = StreamedAnswer()
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", fleet.url + "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, await response.aread()
        heard.decode = ROUTE.search(response.headers["x-baton-route"])[1]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                heard.take(json.loads(line[6:]))
                if disturb and heard.tokens >= after:
                    disturb(heard.decode)
                    disturb = None
    assert disturb is None, "the answer ended before it could be disturbed"
    return heard


class Damage(NamedTuple):
    """Counts how two answers differ, in tokens over all choices; ``other`` is 1 if anything besides the ids
    does.
    """

    wrong: int = 0
    lost: int = 0
    repeated: int = 0
    other: int = 0


class Kill(NamedTuple):
    """Holds one run: ``gap_s`` is the longest silence of a choice from the kill on, ``back_s`` the time until the
    worker is back.
    """

    seed: int
    kind: str
    part: str
    damage: Damage
    gap_s: float
    back_s: float


def damage(got: StreamedAnswer, want: StreamedAnswer) -> Damage:
    """Returns how the disturbed run differs from the undisturbed one."""
    wrong = lost = repeated = 0
    for index in want.choices.keys() | got.choices.keys():
        mine, theirs = (h.choices.get(index, {"ids": []})["ids"] for h in (got, want))
        wrong += sum(a != b for a, b in zip(mine, theirs, strict=False))
        lost, repeated = lost + max(0, len(theirs) - len(mine)), repeated + max(0, len(mine) - len(theirs))
    other = got.answer != want.answer or any(len(c["ends"]) != 1 for c in got.choices.values())
    return Damage(wrong, lost, repeated, int(other))


async def kill_under(fleet: Fleet, seed: int, vocab: int) -> Kill:
    """One seeded kill -9 mid-stream, of either process of the decode worker that writes the answer."""
    rng = random.Random(seed)
    kind, part = list(KINDS)[seed % len(KINDS)], rng.choice(["engine", "io"])
    body, after, killed = drawn(rng, vocab, kind), rng.randrange(1, MAX_TOKENS // 2), list[float]()
    unbroken = await ask(fleet, body)
    before = {slot: fleet.record(slot).incarnation for slot in fleet.slots}

    def kill(slot: str) -> None:
        fleet.kill(slot, part)
        killed.append(time.monotonic())

    broken = await ask(fleet, body, after, kill)
    back = await asyncio.to_thread(fleet.wait_for_return, broken.decode, before[broken.decode])
    gap = broken.silence(since=killed[0])
    return Kill(seed, kind, part, damage(broken, unbroken), gap, back - killed[0])


def report(engine: str, kills: list[Kill]) -> str:
    """A line by kind and one for all: kills, damage, the gap, and how long the worker was away."""
    lines = [f"{engine} engine", f"{'':20} kills  wrong  lost  repeated  other   gap p50    p99    max   back p99"]
    for kind in (*KINDS, "all"):
        some = [k for k in kills if kind in (k.kind, "all")]
        harm = [sum(k.damage[i] for k in some) for i in range(4)]
        gaps, backs = sorted(k.gap_s for k in some), sorted(k.back_s for k in some)
        lines.append(
            f"{kind:20} {len(some):5}  {harm[0]:5} {harm[1]:5}  {harm[2]:8}  {harm[3]:5}  "
            f"{_at(gaps, 50):6.2f} s {_at(gaps, 99):4.2f} s {_at(gaps, 100):4.2f} s    {_at(backs, 99):5.2f} s"
        )
    return "\n".join(lines)


def _at(ordered: Iterable[float], percent: int) -> float:
    values = list(ordered)
    return values[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0
