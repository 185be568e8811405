"""The free memory of Redis, by its own count, asked for at most once a second.

Knows nothing of what is stored. Nothing is evicted (``maxmemory-policy noeviction``), because leases, jobs and
files must not vanish; so whoever stores much asks here first and leaves the rest of the memory to what is small.

0 ──────────── uploads ──────────── 60% ── batch answers ── 80% ── leases, rates, membership, index ── 100%
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

UPLOADS, ANSWERS = 0.6, 0.8  # of maxmemory, up to which each may fill the store
COPIES = 3  # of a value while it is written: the client's buffer, the script's argument, the value itself
LOOK_EVERY_S = 1.0  # seconds between two looks at how full Redis is


class RedisMemory:
    """Tells how much of Redis's memory is left; a server without a limit, or that doesn't tell it, is never
    full.
    """

    def __init__(self, redis: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis, self._clock = redis, clock
        self._at = float("-inf")
        self._used = self._most = 0

    async def most(self) -> int:
        """Returns the server's limit in bytes, 0 without one. Raises RedisError, OSError."""
        await self.left(1.0)
        return self._most

    async def left(self, share: float) -> int | None:
        """Returns the bytes until ``share`` (0 to 1) of the memory is used; None without a limit.

        Raises RedisError, OSError.
        """
        if self._clock() - self._at >= LOOK_EVERY_S:
            self._used, self._most = await self._look()
            self._at = self._clock()
        return int(share * self._most) - self._used if self._most else None

    async def has(self, size: int, share: float) -> bool:
        """Returns whether COPIES * ``size`` bytes fit below ``share`` (0 to 1) of the memory.

        Raises RedisError, OSError.
        """
        left = await self.left(share)
        return left is None or COPIES * size <= left

    def wrote(self, size: int) -> None:
        """Adds ``size`` bytes, just written, to the known use."""
        self._used += size

    async def _look(self) -> tuple[int, int]:
        try:
            info = cast(dict[str, int], await self._redis.info("memory"))
        except ResponseError:  # INFO isn't ours to ask there
            return 0, 0
        return info.get("used_memory", 0), info.get("maxmemory", 0)
