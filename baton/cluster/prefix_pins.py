"""The list of a cluster's pinned prefixes, kept in Redis: routers write what clients ask for, and every router
lists it.

Knows nothing of workers' pages or of who may ask. An expired entry is ignored, and deleted by whoever sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.protos.errors import Unavailable

log = logging.getLogger("baton.cluster")


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
    """Keeps the pinned prefixes of one cluster in Redis. ``wall_clock`` gives Unix seconds."""

    def __init__(self, redis: Redis, namespace: str, wall_clock: Callable[[], float]) -> None:
        self._redis, self._key, self._wall_clock = redis, f"{{{namespace}}}:prefix-pins", wall_clock

    async def put(self, pin: PinnedPrefix) -> None:
        """Writes an entry, replacing one of the same id. Raises Unavailable."""
        await self._asked(self._redis.hset(self._key, pin.id, msgspec.json.encode(pin).decode()))

    async def remove(self, *ids: str) -> None:
        """Removes entries; unknown ones are no error. Raises Unavailable."""
        if ids:
            await self._asked(self._redis.hdel(self._key, *ids))

    async def all(self) -> list[PinnedPrefix]:
        """Returns the entries that haven't expired, the oldest first. Raises Unavailable."""
        rows = cast(dict[bytes, bytes], await self._asked(self._redis.hgetall(self._key)))
        found = [pin for row in rows.values() if (pin := _decoded(row)) is not None]
        now = self._wall_clock()
        await self.remove(*(pin.id for pin in found if pin.until <= now))
        return sorted((pin for pin in found if pin.until > now), key=lambda pin: (pin.created, pin.id))

    async def _asked(self, answer: object) -> object:
        try:
            return await cast(Awaitable[object], answer)
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
