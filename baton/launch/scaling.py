"""Watches Redis for other numbers of workers (`baton scale`), and passes them on.

Knows nothing of placement. Requests made before the watch began are ignored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from baton.cluster.membership import connect
from baton.cluster.scale import ScaleRequest, announce_placer, read

LOOK_S = 0.5  # seconds between two looks at how many workers are asked for
log = logging.getLogger("baton.placement")


async def watch_scale(url: str, namespace: str, apply: Callable[[ScaleRequest], Awaitable[None]]) -> None:
    """Until cancelled, awaits ``apply`` with each new request for other numbers of workers.

    While the Redis at ``url`` is away there are no requests.
    """
    redis, known, serial = connect(url), False, 0
    try:
        while True:
            try:
                asked = await read(redis, namespace)
                if known and asked is not None and asked.serial != serial:
                    await apply(asked)
                known, serial = True, asked.serial if asked else 0
                await announce_placer(redis, namespace)  # who waits for this sign asks after what was read
            except (RedisError, OSError) as error:
                log.debug("Redis is away: %s", error)
            await asyncio.sleep(LOOK_S)
    finally:
        await redis.aclose()
