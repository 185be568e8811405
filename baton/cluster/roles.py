"""The role that each slot was last told to take, by which a restarted worker starts.

Knows nothing of why. The role wanted in Redis overrides the slot's own record, and that overrides the planned role:
a worker that is killed during a change comes back in the role that it was to become.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import cast

import redis as blocking
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.store.lease import LeaseTurn, NamedLease, lease_key
from baton.protos.errors import Unavailable

ROLES = ("prefill", "decode")
# Seconds that a turn outlasts its router, and that others wait for it: most changes take less.
TURN_S, PATIENCE_S = 5.0, 35.0
TURN = "roles"  # the name of the lease by which routers have their turns
# KEYS: roles, the turn's lease; ARGV: slot, role, turn ("": any)
_WANT = """
if ARGV[3] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""


def roles_key(namespace: str) -> str:
    """Returns the key of the Redis hash slot -> role."""
    return f"{{{namespace}}}:roles"


class RoleWishes:
    """Keeps the roles that one cluster's slots should have, in Redis."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._key, self._turns = redis, roles_key(namespace), lease_key(namespace, TURN)
        self._want = redis.register_script(_WANT)

    async def of(self, slot: str) -> str:
        """Returns the role wanted for ``slot``; "" if there is none. Raises RedisError and OSError."""
        found = await cast(Awaitable[bytes | None], self._redis.hget(self._key, slot))
        role = found.decode() if isinstance(found, bytes) else ""
        return role if role in ROLES else ""

    async def want(self, slot: str, role: str, turn: str = "") -> bool:
        """Stores the role wanted for ``slot``; returns False if Redis is away, or if the ``turn`` is over in which
        a router asked for it ("": in none).
        """
        try:
            return bool(await self._want(keys=[self._key, self._turns], args=[slot, role, turn]))
        except (RedisError, OSError):
            return False


class RoleTurns:
    """Lets one router of a cluster change roles at a time, by a lease in Redis."""

    def __init__(self, redis: Redis, namespace: str, router_id: str) -> None:
        self._lease = NamedLease(redis, namespace, TURN, router_id, TURN_S)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[RoleTurn]:
        """Waits until no other router changes roles, and keeps them from it while entered. Raises Unavailable."""
        async with contextlib.AsyncExitStack() as held:
            try:
                turn = await held.enter_async_context(self._lease.turn(PATIENCE_S))
            except TimeoutError:
                raise Unavailable("another router changes roles; try again", retry_after_s=5.0) from None
            except (RedisError, OSError) as error:
                raise Unavailable(
                    f"Redis is away ({error}): routers couldn't agree on roles; try again", retry_after_s=1.0
                ) from None
            yield RoleTurn(turn)


class RoleTurn:
    """A router's turn to change roles, whose ``name`` workers ask for before they begin another one."""

    def __init__(self, turn: LeaseTurn) -> None:
        self.name, self._turn = turn.name, turn

    def require(self) -> None:
        """Raises Unavailable where another router may have had its turn since, because this one stood still."""
        if not self._turn.is_sure:
            raise Unavailable(
                "this router stood still, or Redis was away: another may have changed roles; try again",
                retry_after_s=1.0,
            )


def forget_roles(url: str, namespace: str) -> None:
    """Deletes the wanted roles left by an earlier cluster of this namespace; ignores a Redis that is away."""
    with contextlib.suppress(RedisError, OSError), blocking.Redis.from_url(url, socket_timeout=2.0) as client:
        client.delete(roles_key(namespace))
