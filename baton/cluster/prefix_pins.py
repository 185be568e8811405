"""The list of a cluster's pinned prefixes, kept in Redis: routers write what clients ask for, and every router
lists it.

Knows nothing of workers' pages or of who may ask. An entry ends by Redis's clock, because routers' wall clocks
differ, and may be set.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import TypeVar, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.protos.errors import Unavailable

log = logging.getLogger("baton.cluster")
T = TypeVar("T")
# KEYS: set of ids; ARGV: entry key prefix. Ids whose time is over leave the set here.
_LIST = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local pin = redis.call('GET', ARGV[1] .. id)
  if pin then found[#found + 1] = pin else redis.call('SREM', KEYS[1], id) end
end
return found
"""


class PinnedPrefix(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describes a pinned prefix of ``tokens`` tokens; ``workers`` gives the number of them that each worker keeps,
    by id.

    ``created`` and ``until`` are Unix seconds. A pin ends with its worker's process: ``incarnations`` names the one
    that took it, by worker's id; ``lost`` are the workers that have restarted since, and keep nothing of it.
    """

    id: str
    tenant: str
    model: str
    tokens: int
    created: float
    until: float
    workers: dict[str, int] = {}
    incarnations: dict[str, str] = {}
    lost: tuple[str, ...] = ()


class PrefixPinStore:
    """Keeps the pinned prefixes of one cluster in Redis."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._ids = redis, f"{{{namespace}}}:prefix-pins:ids"
        self._entry = f"{{{namespace}}}:prefix-pin:"
        self._list = redis.register_script(_LIST)

    async def put(self, pin: PinnedPrefix, lasts_s: float) -> None:
        """Writes an entry that ends in ``lasts_s`` seconds. Raises Unavailable."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.sadd(self._ids, pin.id)
            pipe.set(self._entry + pin.id, msgspec.json.encode(pin), px=max(1, int(lasts_s * 1000)))
            await self._asked(pipe.execute())

    async def remove(self, pin: str) -> None:
        """Removes the entry of that id; an unknown one is no error. Raises Unavailable."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._entry + pin)
            pipe.srem(self._ids, pin)
            await self._asked(pipe.execute())

    async def all(self) -> list[PinnedPrefix]:
        """Returns the entries that haven't ended, the oldest first. Raises Unavailable."""
        rows = await self._asked(cast(Awaitable[list[bytes]], self._list(keys=[self._ids], args=[self._entry])))
        found = [pin for row in rows if (pin := _decoded(row)) is not None]
        return sorted(found, key=lambda pin: (pin.created, pin.id))

    async def _asked(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except (RedisError, OSError) as error:
            raise Unavailable(
                "Redis is away: pinned prefixes are kept there; try again", retry_after_s=1.0
            ) from error


def _decoded(row: bytes) -> PinnedPrefix | None:
    try:
        return msgspec.json.decode(row, type=PinnedPrefix)
    except msgspec.MsgspecError as error:
        log.warning("a pinned prefix is not readable: %s", error)
        return None
