"""A named lease in Redis: one of many processes holds it for a while, and renews it.

Knows nothing of what the holder does. Without Redis nobody holds it. A holder that pauses for longer than the lease
may find another in its place; it learns that at its next ``hold``, so what it does must be safe beside another
holder.
"""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis
from redis.exceptions import RedisError

# KEYS: the lease; ARGV: who, ms. 1: it is ours for that long.
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
# KEYS: the lease; ARGV: who
_LEAVE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1"


class NamedLease:
    """Holds the lease ``name`` within the namespace for ``who``, ``seconds`` at a time."""

    def __init__(self, redis: Redis, namespace: str, name: str, who: str, seconds: float) -> None:
        self._key, self._who, self._ms = f"{{{namespace}}}:lease:{name}", who, int(seconds * 1000)
        self._until = float("-inf")
        self._hold, self._leave = redis.register_script(_HOLD), redis.register_script(_LEAVE)

    async def hold(self) -> bool:
        """Takes or renews the lease; returns False if another has it, or Redis is away."""
        asked = asyncio.get_running_loop().time()  # Redis counts from later on
        try:
            held = bool(await self._hold(keys=[self._key], args=[self._who, self._ms]))
        except (RedisError, OSError):
            return False
        self._until = asked + self._ms / 1000 if held else float("-inf")
        return held

    @property
    def is_sure(self) -> bool:
        """Returns whether nobody else can have the lease by now, without asking: this process may have stood still
        since ``hold``, or waited for Redis.
        """
        return asyncio.get_running_loop().time() < self._until

    async def leave(self) -> None:
        """Gives the lease up, so that another can have it at once."""
        try:
            await self._leave(keys=[self._key], args=[self._who])
        except (RedisError, OSError):
            return
