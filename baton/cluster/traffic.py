"""Traffic counts per second, summed by router processes for the controller that decides on ratios.

Knows nothing of how it is used. Slices add up over routers and seconds; they are kept in Redis, bounded, for ten
minutes, and may be lost without harm. No prompt, token or tenant is in them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

KEPT_SLICES = 1200  # slices of traffic that Redis keeps at most
KEPT_S = 600.0  # seconds that sums of traffic are kept: ten minutes
LATE_S = 30.0  # seconds by which routers' clocks, and their pushes, may differ
PAGE = 32  # slices read at a time, because the event loop serves requests between two pages


class ClassTraffic(msgspec.Struct, array_like=True):
    """Counts the traffic of one context class; ``arrived`` and ``arrived_tokens`` at arrival, the rest when an
    answer ends.

    ``pairs``: query-key pairs of the uncached prompt tokens. ``context_tokens``: KV tokens read over all decode
    steps. ``judged`` had an SLO; ``good`` of them met it.
    """

    arrived: int = 0
    arrived_tokens: int = 0
    ended: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pairs: float = 0.0
    output_tokens: int = 0
    context_tokens: float = 0.0
    judged: int = 0
    good: int = 0

    def add(self, other: ClassTraffic) -> None:
        """Adds the counts of ``other`` to these."""
        self.arrived += other.arrived
        self.arrived_tokens += other.arrived_tokens
        self.ended += other.ended
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.pairs += other.pairs
        self.output_tokens += other.output_tokens
        self.context_tokens += other.context_tokens
        self.judged += other.judged
        self.good += other.good


class PredictedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Compares one answer's predicted and observed seconds to the first token and per output token; None:
    unknown.
    """

    predicted_ttft: float | None
    ttft: float | None
    predicted_tpot: float | None
    tpot: float | None


class ServedRequest(msgspec.Struct, frozen=True, array_like=True):
    """Describes one request for the simulator: ``at`` is arrival in Unix seconds; tokens in, out, and found in a
    cache.

    ``adapter`` is a number that its LoRA adapter has at every router; 0: none.
    """

    at: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    adapter: int = 0


class TrafficSlice(msgspec.Struct, array_like=True):
    """Counts one router's traffic of about a second, until ``at`` (Unix seconds).

    ``waiting`` requests, of ``waiting_tokens`` prompt tokens, have no placement yet. ``twins`` and ``served`` list
    some of the ended answers.
    """

    router: str
    at: float
    seconds: float
    classes: dict[str, ClassTraffic] = {}
    waiting: int = 0
    waiting_tokens: int = 0
    twins: list[PredictedAnswer] = []
    served: list[ServedRequest] = []


def by_class(slices: Iterable[TrafficSlice]) -> dict[str, ClassTraffic]:
    """Returns the sums over all slices, by context class."""
    total: dict[str, ClassTraffic] = {}
    for one in slices:
        for name, traffic in one.classes.items():
            total.setdefault(name, ClassTraffic()).add(traffic)
    return total


class TrafficStore:
    """Keeps traffic slices in Redis; while Redis is away, reads return nothing and writes are dropped."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._key = redis, f"{{{namespace}}}:control:traffic"

    async def push(self, one: TrafficSlice) -> None:
        """Adds a slice; the oldest beyond KEPT_SLICES are deleted."""
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.lpush(self._key, msgspec.msgpack.encode(one))
                pipe.ltrim(self._key, 0, KEPT_SLICES - 1)
                pipe.pexpire(self._key, int(KEPT_S * 1000))
                await pipe.execute()
        except (RedisError, OSError):
            return

    async def recent(self, since: float, most: int = KEPT_SLICES) -> list[TrafficSlice]:
        """Returns the slices, of the last ``most``, that ended after ``since`` (Unix seconds), oldest first."""
        found: dict[tuple[str, float], TrafficSlice] = {}  # one that is pushed meanwhile shifts the others
        for start in range(0, most, PAGE):
            stop = min(start + PAGE, most) - 1
            try:
                rows = await cast(Awaitable[list[bytes]], self._redis.lrange(self._key, start, stop))
            except (RedisError, OSError):
                return []
            page = [one for row in rows if (one := _decoded(row)) is not None]
            found |= {(one.router, one.at): one for one in page if one.at > since}
            if len(rows) < PAGE or (page and max(one.at for one in page) < since - LATE_S):
                break  # what was pushed earlier is older
        return sorted(found.values(), key=lambda one: one.at)


def _decoded(row: bytes) -> TrafficSlice | None:
    try:
        return msgspec.msgpack.decode(row, type=TrafficSlice)
    except msgspec.MsgspecError:
        return None  # of another version
