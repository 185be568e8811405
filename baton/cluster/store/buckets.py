"""Token buckets that every router of a cluster draws from, kept in Redis and timed by its clock alone.

Knows nothing of what is counted. A bucket may be overdrawn (what an answer cost is known only at its end); it
then refuses until it has filled up again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.store.patience import CircuitBreaker

FULL_MS = 180_000  # that a bucket is kept once it is full again: full and unknown are the same
# KEYS: buckets; ARGV: per bucket capacity, refill per second, cost; then FULL_MS. Taken from all, or from none.
# -> {1} or {0, milliseconds until there would be enough}
_TAKE = """
local now = redis.call('TIME')
local at = now[1] * 1000 + math.floor(now[2] / 1000)
local levels, wait = {}, 0
for i = 1, #KEYS do
  local capacity, rate, cost = tonumber(ARGV[i*3-2]), tonumber(ARGV[i*3-1]), tonumber(ARGV[i*3])
  local held = redis.call('HMGET', KEYS[i], 'level', 'at')
  local level = capacity
  if held[1] then level = math.min(capacity, tonumber(held[1]) + (at - tonumber(held[2])) / 1000 * rate) end
  levels[i] = level
  local need = math.min(cost, capacity)
  if level < need then wait = math.max(wait, math.ceil((need - level) / rate * 1000)) end
end
if wait > 0 then return {0, wait} end
for i = 1, #KEYS do
  local capacity, rate, level = tonumber(ARGV[i*3-2]), tonumber(ARGV[i*3-1]), levels[i] - tonumber(ARGV[i*3])
  redis.call('HSET', KEYS[i], 'level', level, 'at', at)
  redis.call('PEXPIRE', KEYS[i], math.ceil((capacity - level) / rate * 1000) + tonumber(ARGV[#ARGV]))
end
return {1, 0}
"""
# KEYS: bucket; ARGV: capacity, refill per second, cost (below 0: given back, up to full), FULL_MS. Overdraws; a
# bucket that isn't there was full.
_SPEND = """
local now = redis.call('TIME')
local at = now[1] * 1000 + math.floor(now[2] / 1000)
local capacity, rate = tonumber(ARGV[1]), tonumber(ARGV[2])
local held = redis.call('HMGET', KEYS[1], 'level', 'at')
local level = capacity
if held[1] then level = math.min(capacity, tonumber(held[1]) + (at - tonumber(held[2])) / 1000 * rate) end
level = math.min(capacity, level - tonumber(ARGV[3]))
redis.call('HSET', KEYS[1], 'level', level, 'at', at)
redis.call('PEXPIRE', KEYS[1], math.ceil((capacity - level) / rate * 1000) + tonumber(ARGV[4]))
return 1
"""


class RateBuckets:
    """Keeps token buckets under ``{namespace}:bucket:NAME`` in Redis; ``patience`` bounds how long a request waits
    for Redis.
    """

    def __init__(self, redis: Redis, namespace: str, patience: CircuitBreaker | None = None) -> None:
        self._redis, self._prefix, self._patience = redis, f"{{{namespace}}}:bucket:", patience or CircuitBreaker()
        self._take, self._spend = redis.register_script(_TAKE), redis.register_script(_SPEND)

    async def take(self, costs: Mapping[str, tuple[float, float]]) -> float | None:
        """Takes ``costs``, bucket name -> (refill per minute, cost), from all buckets or from none.

        Returns 0.0 if they were taken, else the seconds to wait; None if Redis is away.
        """
        args: list[float | str] = []
        for per_min, cost in costs.values():
            args += [per_min, per_min / 60, cost]
        try:
            taken, wait_ms = await self._patience.ask(
                lambda: self._take(keys=[self._prefix + k for k in costs], args=[*args, FULL_MS])
            )
        except (TimeoutError, RedisError, OSError):
            return None
        return 0.0 if taken else max(0.001, wait_ms / 1000)

    async def spend(self, costs: Mapping[str, tuple[float, float]]) -> None:
        """Takes ``costs``, bucket name -> (refill per minute, cost), of what was already used, and gives back those
        below 0; they are lost if Redis is away.
        """
        pipe = self._redis.pipeline(transaction=False)
        for name, (per_min, cost) in costs.items():
            await self._spend(keys=[self._prefix + name], args=[per_min, per_min / 60, cost, FULL_MS], client=pipe)
        try:
            async with asyncio.timeout(1.0):
                await pipe.execute()
        except (TimeoutError, RedisError, OSError):
            return
