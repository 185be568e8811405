"""A slot's lease in Redis, which keeps two nodes, whose file locks don't meet, from serving one slot.

Knows nothing of processes. ``place`` names the machine and directory of a holder: a claimant from the same place
has that directory's file lock, which proves that the earlier holder is gone, and takes over at once. Others wait.

A Redis that restarts empty has lost every lease, and a claimant may be the first to ask. So leases belong to an
``epoch``, a value that the first of them writes and that is lost with them. A holder of an earlier epoch takes a
lease back that is younger than a lease lasts: its claimant, which has hardly begun, leaves.
"""

from __future__ import annotations

import itertools
from typing import cast

from redis.asyncio import Redis

# KEYS: lease, epoch; ARGV: owner, place, ms, name of an epoch that begins.
# A list with the epoch: it is ours; else the holder's place
_TAKE = """
local held = redis.call('HMGET', KEYS[1], 'owner', 'place')
if held[1] and held[1] ~= ARGV[1] and held[2] ~= ARGV[2] then return held[2] end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('SET', KEYS[2], ARGV[4]) end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'place', ARGV[2], 'since', now)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {redis.call('GET', KEYS[2])}
"""
# KEYS: lease, epoch; ARGV: owner, place, ms, name of an epoch that begins, that of our lease.
# A list with the epoch: still ours (or nobody's, or one's who asked when Redis had lost it, and so ours again); 0:
# another's
_KEEP = """
local held, clock = redis.call('HMGET', KEYS[1], 'owner', 'since'), redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
if held[1] and held[1] ~= ARGV[1] then
  local age = now - tonumber(held[2] or 0)
  if redis.call('GET', KEYS[2]) == ARGV[5] or age > tonumber(ARGV[3]) then return 0 end
end
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('SET', KEYS[2], ARGV[4]) end
if held[1] ~= ARGV[1] then redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'place', ARGV[2], 'since', 0) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {redis.call('GET', KEYS[2])}
"""
_DROP = "if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class SlotLease:
    """Holds the lease of one slot for ``owner``, ``ttl_s`` seconds at a time.

    Every method raises RedisError or OSError if Redis is away.
    """

    def __init__(self, redis: Redis, namespace: str, slot: str, owner: str, place: str, ttl_s: float) -> None:
        self._key, self._owner = f"{{{namespace}}}:slot:{slot}", owner
        self._names = itertools.count()
        self._keys, self._epoch = [self._key, f"{{{namespace}}}:slots:epoch"], b""
        self._args: list[str | int] = [owner, place, int(ttl_s * 1000)]
        self._take, self._keep = redis.register_script(_TAKE), redis.register_script(_KEEP)
        self._drop = redis.register_script(_DROP)

    async def take(self) -> str:
        """Takes the lease and returns ""; returns the holder's place if another place has it."""
        answer = cast(list[bytes] | bytes, await self._take(keys=self._keys, args=self._said()))
        if isinstance(answer, bytes):
            return answer.decode()
        (self._epoch,) = answer
        return ""

    async def keep(self) -> bool:
        """Renews the lease; returns False if another owner has it, unless he took it from a Redis that had just
        lost it.
        """
        answer = cast(list[bytes] | int, await self._keep(keys=self._keys, args=[*self._said(), self._epoch]))
        if isinstance(answer, int):
            return False
        (self._epoch,) = answer
        return True

    async def drop(self) -> None:
        """Gives the lease up if this owner has it."""
        await self._drop(keys=[self._key], args=[self._owner])

    def _said(self) -> list[str | int]:
        return [*self._args, f"{self._owner}.{next(self._names)}"]
