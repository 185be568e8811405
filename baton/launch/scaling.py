"""Watches Redis for other numbers of workers (`baton scale`), and says so to whoever places them.

Knows nothing of placement. What was asked before we began to watch is not asked of us.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from baton.cluster.membership import connect
from baton.cluster.scale import ScaleRequest, read

LOOK_S = 0.5
log = logging.getLogger("baton.placement")


async def watch_scale(url: str, namespace: str, apply: Callable[[ScaleRequest], Awaitable[None]]) -> None:
    """Hands each new request to ``apply`` until cancelled. A Redis that is away asks for nothing."""
    redis, known, serial = connect(url), False, 0
    try:
        while True:
            try:
                asked = await read(redis, namespace)
                if known and asked is not None and asked.serial != serial:
                    await apply(asked)
                known, serial = True, asked.serial if asked else 0
            except (RedisError, OSError) as error:
                log.debug("Redis is away: %s", error)
            await asyncio.sleep(LOOK_S)
    finally:
        await redis.aclose()
