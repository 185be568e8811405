"""What the controller thinks and did, kept in Redis for every router, dashboard and console to read.

Knows nothing of how a ratio is chosen. Two things are here: the latest ``Advice`` (it expires, so that a dead
controller's word isn't taken for news) and a bounded timeline of ``TimelineEntry``s, newest first.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

ADVICE_TTL_S = 120.0
TIMELINE = 256
T = TypeVar("T")
log = logging.getLogger("baton.cluster")


class RatioPoint(msgspec.Struct, frozen=True):
    """One point of the dial: what the twin says of the recent traffic on that ratio. Times in seconds."""

    prefill: int
    decode: int
    goodput: float  # good requests per second
    attainment: float  # share of requests that meet every SLO
    ttft_p99_s: float = 0.0
    tpot_p99_s: float = 0.0


class TwinError(msgspec.Struct, frozen=True):
    """Predicted against observed, as relative errors of the medians (0.1: 10% off); None where nothing was seen.

    ``bound`` is the error above which no advice is given; ``samples`` requests were compared.
    """

    ttft: float | None = None
    tpot: float | None = None
    throughput: float | None = None
    bound: float = 0.0
    samples: int = 0

    @property
    def worst(self) -> float | None:
        """Returns the largest error of the figures that are known."""
        seen = [abs(e) for e in (self.ttft, self.tpot, self.throughput) if e is not None]
        return max(seen, default=None)


class Advice(msgspec.Struct, frozen=True):
    """The controller's latest look. ``at`` in seconds since 1970.

    ``recommended`` None: none is given, and ``withheld`` says why. ``interval`` and ``plateau`` are in prefill
    workers: where the best lies with 90% confidence, and which ratios are as good within 2%. ``pressure`` is the
    load on each role over what it can carry (1.0: full), on the ratio as it is.
    """

    at: float
    mode: str  # "off", "advise", "auto", or "pinned"
    prefill: int
    decode: int
    reason: str
    recommended: tuple[int, int] | None = None
    interval: tuple[int, int] | None = None
    plateau: tuple[int, int] | None = None
    goodput_by_ratio: tuple[RatioPoint, ...] = ()
    pressure: tuple[float, float] | None = None
    twin_error: TwinError = TwinError()
    withheld: str = ""


class TimelineEntry(msgspec.Struct, frozen=True):
    """One entry of the timeline: what was decided, why, and how it went. ``at`` in seconds since 1970.

    ``kind``: "hold" (a reason changed), "advise" (dry run), "rerole" (workers change role), "add" and "remove"
    (replicas come and go), "pin", "unpin", "failed". ``workers`` are the slots that change; ``seconds`` is how long
    it took, 0 while it runs.
    """

    at: float
    kind: str
    before: tuple[int, int]
    after: tuple[int, int]
    reason: str
    workers: tuple[str, ...] = ()
    seconds: float = 0.0
    by: str = "controller"


class RatioPin(msgspec.Struct, frozen=True):
    """An operator's word: this ratio, until it is taken back. The controller doesn't touch a pinned cluster."""

    prefill: int
    decode: int
    at: float = 0.0
    by: str = ""


class AdviceStore:
    """Reads give None or nothing, and writes False, while Redis is away. ``controlled``: there is a controller."""

    def __init__(self, redis: Redis, namespace: str, controlled: bool = True) -> None:
        self._redis, self.controlled = redis, controlled
        self._advice, self._timeline, self._pin, self._mode = (
            f"{{{namespace}}}:control:{name}" for name in ("advice", "timeline", "pin", "mode")
        )

    async def put(self, advice: Advice, ttl_s: float = ADVICE_TTL_S) -> bool:
        """Replaces the advice that is stored."""
        try:
            await self._redis.set(self._advice, msgspec.msgpack.encode(advice), px=int(ttl_s * 1000))
        except (RedisError, OSError):
            return False
        return True

    async def get(self) -> Advice | None:
        """Returns the latest advice; None when it is too old, or Redis is away."""
        return _decoded(await self._read(self._advice), Advice)

    async def note(self, change: TimelineEntry) -> bool:
        """Adds to the timeline; the oldest entry leaves a full one."""
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.lpush(self._timeline, msgspec.msgpack.encode(change))
                pipe.ltrim(self._timeline, 0, TIMELINE - 1)
                await pipe.execute()
        except (RedisError, OSError):
            return False
        return True

    async def timeline(self, most: int = TIMELINE) -> tuple[TimelineEntry, ...]:
        """Returns the timeline, newest first."""
        try:
            rows = cast(list[bytes], await cast(Awaitable[Any], self._redis.lrange(self._timeline, 0, most - 1)))
        except (RedisError, OSError):
            return ()
        return _changes(rows)

    async def look(self, most: int = TIMELINE) -> tuple[Advice | None, tuple[TimelineEntry, ...], RatioPin | None]:
        """Reads advice, timeline and pin in one round trip, for those who only show them."""
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.get(self._advice)
                pipe.lrange(self._timeline, 0, most - 1)
                pipe.get(self._pin)
                advice, rows, pin = await pipe.execute()
        except (RedisError, OSError):
            return None, (), None
        return _decoded(advice, Advice), _changes(rows), _decoded(pin, RatioPin)

    async def pin(self, pin: RatioPin | None) -> bool:
        """Pins a ratio; None takes the pin back."""
        try:
            if pin is None:
                await self._redis.delete(self._pin)
            else:
                await self._redis.set(self._pin, msgspec.msgpack.encode(pin))
        except (RedisError, OSError):
            return False
        return True

    async def pinned(self) -> RatioPin | None:
        """Returns what an operator pinned.

        Raises RedisError and OSError: not knowing isn't the same as not pinned.
        """
        return _decoded(cast("bytes | None", await self._redis.get(self._pin)), RatioPin)

    async def set_mode(self, mode: str) -> bool:
        """Stores an operator's mode for the controller, which counts before that of the configuration."""
        try:
            await self._redis.set(self._mode, mode)
        except (RedisError, OSError):
            return False
        return True

    async def mode(self) -> str:
        """Returns the mode that an operator set; empty where nobody set one."""
        return (await self._read(self._mode) or b"").decode()

    async def _read(self, key: str) -> bytes | None:
        try:
            found = await self._redis.get(key)
        except (RedisError, OSError):
            return None
        return found if isinstance(found, bytes) else None


def _changes(rows: Sequence[bytes]) -> tuple[TimelineEntry, ...]:
    return tuple(change for row in rows if (change := _decoded(row, TimelineEntry)) is not None)


def _decoded(row: bytes | None, kind: type[T]) -> T | None:
    """An entry that another version wrote may not fit ours: it is left out, loudly."""
    if row is None:
        return None
    try:
        return msgspec.msgpack.decode(row, type=kind)
    except msgspec.MsgspecError as error:
        log.warning("an entry of the controller is not readable: %s", error)
        return None
