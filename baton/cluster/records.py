"""Records that every router of a cluster can read, kept in Redis for a while.

Knows nothing of what a record says. Redis is a hint here too: what can't be written is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from redis.asyncio import Redis
from redis.exceptions import RedisError

KEPT_S = 3600
MAX_ID = 256
log = logging.getLogger("baton.cluster")


class RecordStore:
    """``put`` and ``get`` of bytes by id, under ``{namespace}:request:``, each with a TTL in seconds."""

    def __init__(self, redis: Redis, namespace: str, kept_s: float = KEPT_S) -> None:
        self._redis, self._prefix, self._kept_ms = redis, f"{{{namespace}}}:request:", int(kept_s * 1000)
        self._up = True

    async def put(self, records: Mapping[str, bytes]) -> None:
        """All of them in one round trip; dropped when Redis is away."""
        pipe = self._redis.pipeline(transaction=False)
        for key, value in records.items():
            pipe.set(self._prefix + key, value, px=self._kept_ms)
        try:
            await pipe.execute()
        except (TimeoutError, RedisError, OSError) as error:
            self._note(False, error)
        else:
            self._note(True)

    async def get(self, key: str) -> bytes | None:
        """One record; None when there is none, or Redis is away."""
        if len(key) > MAX_ID:
            return None
        try:
            found = await self._redis.get(self._prefix + key)
        except (TimeoutError, RedisError, OSError):
            return None
        return found if isinstance(found, bytes) else None

    def _note(self, up: bool, error: BaseException | None = None) -> None:
        if up != self._up:
            log.warning("decision records are %s", "shared again" if up else f"kept here alone ({error})")
        self._up = up
