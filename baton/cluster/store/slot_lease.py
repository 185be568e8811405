"""A slot's lease in Redis, which keeps two nodes, whose file locks don't meet, from serving one slot.

Knows nothing of processes. ``place`` names the machine and directory of a holder: a claimant from the same place
has that directory's file lock, which proves that the earlier holder is gone, and takes over at once. Others wait.
"""

from __future__ import annotations

from typing import cast

from redis.asyncio import Redis

# KEYS: lease; ARGV: owner, place, ms. 1: it is ours; else the holder's place
_TAKE = """
local held = redis.call('HMGET', KEYS[1], 'owner', 'place')
if held[1] and held[1] ~= ARGV[1] and held[2] ~= ARGV[2] then return held[2] end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'place', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""
# KEYS: lease; ARGV: owner, place, ms. 1: still ours (or nobody's, and so ours again); 0: another's
_KEEP = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'place', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""
_DROP = "if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class SlotLease:
    """Holds the lease of one slot for ``owner``, ``ttl_s`` seconds at a time.

    Every method raises RedisError or OSError if Redis is away.
    """

    def __init__(self, redis: Redis, namespace: str, slot: str, owner: str, place: str, ttl_s: float) -> None:
        self._key, self._owner = f"{{{namespace}}}:slot:{slot}", owner
        self._args: list[str | int] = [owner, place, int(ttl_s * 1000)]
        self._take, self._keep = redis.register_script(_TAKE), redis.register_script(_KEEP)
        self._drop = redis.register_script(_DROP)

    async def take(self) -> str:
        """Takes the lease and returns ""; returns the holder's place if another place has it."""
        answer = cast(int | bytes, await self._take(keys=[self._key], args=self._args))
        return "" if answer == 1 else cast(bytes, answer).decode()

    async def keep(self) -> bool:
        """Renews the lease; returns False if another owner has it."""
        return bool(await self._keep(keys=[self._key], args=self._args))

    async def drop(self) -> None:
        """Gives the lease up if this owner has it."""
        await self._drop(keys=[self._key], args=[self._owner])
