"""The role that each slot was last told to take, by which a restarted worker starts.

Knows nothing of why. The role wanted in Redis overrides the slot's own record, and that overrides the planned role:
a worker that is killed during a change comes back in the role that it was to become.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable
from typing import cast

import redis as blocking
from redis.asyncio import Redis
from redis.exceptions import RedisError

ROLES = ("prefill", "decode")


def roles_key(namespace: str) -> str:
    """Returns the key of the Redis hash slot -> role."""
    return f"{{{namespace}}}:roles"


class RoleWishes:
    """Keeps the roles that one cluster's slots should have, in Redis."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._key = redis, roles_key(namespace)

    async def of(self, slot: str) -> str:
        """Returns the role wanted for ``slot``; "" if there is none. Raises RedisError and OSError."""
        found = await cast(Awaitable[bytes | None], self._redis.hget(self._key, slot))
        role = found.decode() if isinstance(found, bytes) else ""
        return role if role in ROLES else ""

    async def want(self, slot: str, role: str) -> bool:
        """Stores the role wanted for ``slot``; returns False if Redis is away."""
        try:
            await cast(Awaitable[int], self._redis.hset(self._key, slot, role))
        except (RedisError, OSError):
            return False
        return True


def forget_roles(url: str, namespace: str) -> None:
    """Deletes the wanted roles left by an earlier cluster of this namespace; ignores a Redis that is away."""
    with contextlib.suppress(RedisError, OSError), blocking.Redis.from_url(url, socket_timeout=2.0) as client:
        client.delete(roles_key(namespace))
