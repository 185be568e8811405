"""A named lease in Redis: one of many processes holds it for a while, and renews it.

Knows nothing of what the holder does. Without Redis nobody holds it. A holder that pauses for longer than the lease
may find another in its place; it learns that at its next ``hold``, so what it does must be safe beside another
holder.
"""

from __future__ import annotations

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
        self._hold, self._leave = redis.register_script(_HOLD), redis.register_script(_LEAVE)

    async def hold(self) -> bool:
        """Takes or renews the lease; returns False if another has it, or Redis is away."""
        try:
            return bool(await self._hold(keys=[self._key], args=[self._who, self._ms]))
        except (RedisError, OSError):
            return False

    async def leave(self) -> None:
        """Gives the lease up, so that another can have it at once."""
        try:
            await self._leave(keys=[self._key], args=[self._who])
        except (RedisError, OSError):
            return
