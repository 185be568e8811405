"""Which role each slot was last told to play: what a worker that starts again comes back as.

Knows nothing of why. The wish in Redis counts before the slot's own record, and that before the spec it was
planned with: a worker that is killed in the middle of a change comes back as what it was to become.
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
    """Returns the key of the hash slot -> role."""
    return f"{{{namespace}}}:roles"


class RoleWishes:
    """The wishes of one cluster."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._key = redis, roles_key(namespace)

    async def of(self, slot: str) -> str:
        """Returns the role that was asked for; empty when there is none. Raises RedisError and OSError."""
        found = await cast(Awaitable[bytes | None], self._redis.hget(self._key, slot))
        role = found.decode() if isinstance(found, bytes) else ""
        return role if role in ROLES else ""

    async def want(self, slot: str, role: str) -> bool:
        """Stores the role wished for; False when Redis is away."""
        try:
            await cast(Awaitable[int], self._redis.hset(self._key, slot, role))
        except (RedisError, OSError):
            return False
        return True


def forget_roles(url: str, namespace: str) -> None:
    """Forgets what slots became in an earlier cluster of this namespace. Called where one begins."""
    with contextlib.suppress(RedisError, OSError), blocking.Redis.from_url(url, socket_timeout=2.0) as client:
        client.delete(roles_key(namespace))
