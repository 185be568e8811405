"""Records of workers that left the cluster, and why: the last few, for an hour.

Knows nothing of processes or supervisors. Several may report one death (the worker itself, its supervisor, a router
that missed its heartbeats): the first report that knows the cause counts; one that only missed a heartbeat counts
while there is no other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import cast

import msgspec
import redis as blocking
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.store.redis_url import masked

KEPT, KEPT_S = 64, 3600  # departures that are kept, and for how many seconds, because operators look after the fact
WAIT_S = 1.0  # seconds that a worker's end waits for Redis at most
GUESSES = ("lease_lost", "replaced")  # of routers, which saw no more than an entry that went
log = logging.getLogger("baton.cluster")

# KEYS: departures by worker and incarnation, those whose cause is known, all by time; ARGV: field, departure, at,
# 1 where it is a guess, the oldest time that is kept, how many are kept, seconds.
_NOTE = """
local known = redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1
if known or (ARGV[4] == '1' and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if ARGV[4] == '0' then redis.call('SADD', KEYS[2], ARGV[1]) end
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])
local gone = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', ARGV[5])
for _, field in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1 - ARGV[6])) do gone[#gone + 1] = field end
for _, field in ipairs(gone) do
  redis.call('ZREM', KEYS[3], field)
  redis.call('HDEL', KEYS[1], field)
  redis.call('SREM', KEYS[2], field)
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[7]) end
return 1
"""


class Departure(msgspec.Struct, frozen=True):
    """Describes the end of one incarnation of a worker. ``at`` is Unix seconds.

    ``cause``: "drained", "engine" (its engine process died), "signal", "oom", "exit", "slot_lost" (another node
    serves its slot), "lease_lost" (heartbeats ceased) or "replaced" (by another incarnation). ``model_id`` is the
    model that it served, "" if the reporter doesn't know it.
    """

    worker_id: str
    incarnation: str
    role: str
    cause: str
    detail: str
    at: float
    model_id: str = ""


class Departures:
    """Keeps one cluster's departures in Redis; while Redis is away, writes are dropped and reads return nothing.

    ``wall_clock`` gives Unix seconds.
    """

    def __init__(self, redis: Redis, namespace: str, wall_clock: Callable[[], float] = time.time) -> None:
        self._redis, self._keys, self._wall_clock = redis, _keys(namespace), wall_clock
        self._note = redis.register_script(_NOTE)

    def now(self) -> float:
        """Returns Unix seconds, by the clock that the departures' times are of."""
        return self._wall_clock()

    async def note(self, departure: Departure) -> None:
        """Stores a departure, unless its cause is known already. Never raises; waits at most WAIT_S."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self.write(departure)
        except (TimeoutError, RedisError, OSError) as error:
            log.info("the departure of %s is not kept: %s", departure.worker_id, error)

    async def write(self, departure: Departure) -> None:
        """Does what ``note`` does, for however long it takes. Raises RedisError and OSError."""
        await self._note(keys=self._keys, args=_args(departure))

    async def recent(self) -> tuple[Departure, ...]:
        """Returns the departures of the last hour, newest first."""
        try:
            async with asyncio.timeout(WAIT_S):
                rows = await cast(Awaitable[list[bytes]], self._redis.hvals(self._keys[0]))
        except (TimeoutError, RedisError, OSError):
            return ()
        found = [d for row in rows if (d := _decoded(row)) is not None and d.at > self._wall_clock() - KEPT_S]
        return tuple(sorted(found, key=lambda departure: -departure.at))


def last_words(recent: Iterable[Departure], role: str, model_id: str, now: float) -> str:
    """Returns which worker of ``role`` and ``model_id`` left last, when and why, in words; "" if none of
    ``recent`` was one.

    ``now`` is Unix seconds. One that was replaced has not left the cluster without a worker.
    """
    able = [d for d in recent if d.role == role and d.model_id in ("", model_id) and d.cause != "replaced"]
    if not able:
        return ""
    last = max(able, key=lambda departure: departure.at)
    return f"the last one to leave was {last.worker_id}, {max(0.0, now - last.at):.0f} s ago ({last.detail})"


def note_blocking(url: str, namespace: str, departure: Departure) -> None:
    """Stores a departure as ``Departures.note`` does, by blocking calls, for threads without an event loop."""
    try:
        with blocking.Redis.from_url(url, socket_timeout=WAIT_S, socket_connect_timeout=WAIT_S) as client:
            client.eval(_NOTE, 3, *_keys(namespace), *_args(departure))
    except (RedisError, OSError, ValueError) as error:
        log.info("the departure of %s is not kept at %s: %s", departure.worker_id, masked(url), error)


def _keys(namespace: str) -> list[str]:
    return [f"{{{namespace}}}:departed{part}" for part in ("", ":known", ":times")]


def _args(departure: Departure) -> list[str | bytes | float]:
    field = f"{departure.worker_id} {departure.incarnation}"
    guess = int(departure.cause in GUESSES)
    return [field, msgspec.json.encode(departure), departure.at, guess, departure.at - KEPT_S, KEPT, KEPT_S]


def _decoded(row: bytes) -> Departure | None:
    try:
        return msgspec.json.decode(row, type=Departure)
    except msgspec.MsgspecError:
        return None  # of another version
