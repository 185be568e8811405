"""The controller's advice and actions, kept in Redis for every router, dashboard and console to read.

Knows nothing of how a ratio is chosen. It holds the latest ``Advice`` (which expires, so that a dead controller's
advice isn't taken for current), a bounded timeline of ``TimelineEntry``s, newest first, and an operator's pin and
mode. A Redis that lost pin and mode is told again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Sequence
from typing import NamedTuple, TypeVar, cast

import msgspec
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from baton.cluster.store.kept_values import Answers, KeptValues

ADVICE_TTL_S = 120.0  # seconds until advice expires, because a controller that is gone advises nothing
TIMELINE = 256  # entries of the timeline that Redis keeps
# KEYS: pin; ARGV: the one to replace, the one to write ("": none)
_REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '' then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""
T = TypeVar("T")
log = logging.getLogger("baton.cluster")


def pin_key(namespace: str) -> str:
    """Returns the key under which a cluster's RatioPin lies in Redis, as msgpack."""
    return f"{{{namespace}}}:control:pin"


class RatioPoint(msgspec.Struct, frozen=True):
    """Predicts the recent traffic on one ratio of prefill to decode workers. Times in seconds."""

    prefill: int
    decode: int
    goodput: float  # good requests per second
    attainment: float  # share of requests that meet every SLO
    ttft_p99_s: float = 0.0
    tpot_p99_s: float = 0.0


class TwinError(msgspec.Struct, frozen=True):
    """Compares the simulator's predictions with observations, as relative errors of the medians (0.1: 10% off);
    None where nothing was observed.

    ``bound`` is the error above which no advice is given; ``samples`` requests were compared.
    """

    ttft: float | None = None
    tpot: float | None = None
    throughput: float | None = None
    bound: float = 0.0
    samples: int = 0

    @property
    def worst(self) -> float | None:
        """Returns the largest absolute error that is known; None if none is."""
        seen = [abs(e) for e in (self.ttft, self.tpot, self.throughput) if e is not None]
        return max(seen, default=None)


class Advice(msgspec.Struct, frozen=True):
    """Describes the controller's latest evaluation; ``at`` is Unix seconds.

    ``recommended`` None: no recommendation, and ``withheld`` says why. ``interval`` and ``plateau`` are ranges of
    prefill workers: where the best ratio lies with 90% confidence, and which are as good within 2%. ``pressure`` is
    the load on (prefill, decode) over their capacity (1.0: full) at the current ratio.
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
    """Describes one entry of the timeline: what was decided, why, and how it went. ``at`` is Unix seconds.

    ``kind``: "hold" (a reason changed), "advise" (dry run), "rerole" (workers change role), "add" and "remove" (of
    workers), "pin", "unpin", "failed". ``before`` and ``after`` are (prefill, decode) workers. ``workers`` are the
    slots that change; ``seconds`` is how long it took, 0 while it runs.
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
    """Describes the ratio that an operator pinned; the controller leaves a pinned cluster alone."""

    prefill: int
    decode: int
    at: float = 0.0
    by: str = ""


class OperatorWishes(NamedTuple):
    """Holds what an operator asked of the controller: its mode ("": the configuration's) and the pinned ratio."""

    mode: str = ""
    pin: RatioPin | None = None


class AdviceStore:
    """Keeps advice, timeline, pin and mode in Redis; while Redis is away, reads return None or nothing, and writes
    False.

    ``controlled``: the cluster has a controller.
    """

    def __init__(self, redis: Redis, namespace: str, controlled: bool = True) -> None:
        self._redis, self.controlled = redis, controlled
        self._advice, self._timeline, self._mode = (
            f"{{{namespace}}}:control:{name}" for name in ("advice", "timeline", "mode")
        )
        self._pin = pin_key(namespace)
        self._replace = redis.register_script(_REPLACE)
        what = "the operator's mode and pin"
        self._kept = KeptValues(redis, f"{{{namespace}}}:control:kept", what, self._read_wishes, self._write_wishes)

    async def put(self, advice: Advice, ttl_s: float = ADVICE_TTL_S) -> bool:
        """Replaces the stored advice, which expires after ``ttl_s`` seconds; returns False if Redis is away."""
        try:
            await self._redis.set(self._advice, msgspec.msgpack.encode(advice), px=int(ttl_s * 1000))
        except (RedisError, OSError):
            return False
        return True

    async def get(self) -> Advice | None:
        """Returns the latest advice; None if it has expired, or Redis is away."""
        return _decoded(await self._read(self._advice), Advice)

    async def note(self, change: TimelineEntry) -> bool:
        """Adds an entry to the timeline, of which the last TIMELINE are kept; returns False if Redis is away."""
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.lpush(self._timeline, msgspec.msgpack.encode(change))
                pipe.ltrim(self._timeline, 0, TIMELINE - 1)
                await pipe.execute()
        except (RedisError, OSError):
            return False
        return True

    async def timeline(self, most: int = TIMELINE) -> tuple[TimelineEntry, ...]:
        """Returns the last ``most`` entries of the timeline, newest first."""
        try:
            rows = await cast(Awaitable[list[bytes]], self._redis.lrange(self._timeline, 0, most - 1))
        except (RedisError, OSError):
            return ()
        return _changes(rows)

    async def look(self, most: int = TIMELINE) -> tuple[Advice | None, tuple[TimelineEntry, ...], RatioPin | None]:
        """Returns advice, the last ``most`` timeline entries and pin, read in one round trip, for display."""
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
        """Pins a ratio, or with None removes the pin; returns False if Redis is away."""
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                self._kept.sign(pipe)
                if pin is None:
                    pipe.delete(self._pin)
                else:
                    pipe.set(self._pin, msgspec.msgpack.encode(pin))
                await pipe.execute()
        except (RedisError, OSError):
            return False
        return True

    async def unpin(self, pin: RatioPin, earlier: RatioPin | None) -> None:
        """Puts ``earlier`` (None: no pin) in the place of ``pin``, unless another pin has come in its place."""
        mine, before = msgspec.msgpack.encode(pin), msgspec.msgpack.encode(earlier) if earlier else b""
        with contextlib.suppress(RedisError, OSError):
            await self._replace(keys=[self._pin], args=[mine, before])

    async def pinned(self) -> RatioPin | None:
        """Returns the operator's pin; None if there is none.

        Raises RedisError and OSError, because not knowing isn't the same as not pinned.
        """
        return _decoded(cast("bytes | None", await self._redis.get(self._pin)), RatioPin)

    async def set_mode(self, mode: str) -> bool:
        """Stores an operator's mode, which overrides the configuration's ``controller.mode``; returns False if
        Redis is away.
        """
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                self._kept.sign(pipe)
                pipe.set(self._mode, mode)
                await pipe.execute()
        except (RedisError, OSError):
            return False
        return True

    async def wishes(self) -> OperatorWishes:
        """Returns the operator's mode and pin; where Redis has lost them, writes those that were read last.

        Raises RedisError and OSError, because not knowing isn't the same as no wish.
        """
        mode, pin = cast("Sequence[bytes | None]", await self._kept.all())
        return OperatorWishes((mode or b"").decode(), _decoded(pin, RatioPin))

    def _read_wishes(self, pipe: Pipeline) -> None:
        pipe.get(self._mode)
        pipe.get(self._pin)

    def _write_wishes(self, pipe: Pipeline, known: Answers) -> None:
        for name, value in zip((self._mode, self._pin), cast("Sequence[bytes | None]", known), strict=True):
            if value is not None:
                pipe.set(name, value)

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
