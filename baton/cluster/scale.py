"""How many workers of each role somebody asked for, kept in Redis: `baton scale` writes it, who places them reads.

Knows nothing of who places workers, nor whether there is room.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from baton.protos.errors import ConfigError

MOST = 1024


class Scale(msgspec.Struct, frozen=True):
    """Workers of each role. ``serial`` rises with each asking, so that the same numbers can be asked for again."""

    prefill: int
    decode: int
    serial: int = 0


def key(namespace: str) -> str:
    """Where it is kept."""
    return f"{{{namespace}}}:scale"


async def ask(redis: Redis, namespace: str, scale: Scale) -> Scale:
    """Write it; with its serial. Raises ConfigError for numbers that can't be."""
    if not (0 <= scale.prefill <= MOST and 1 <= scale.decode <= MOST):
        raise ConfigError(
            f"prefill={scale.prefill} decode={scale.decode}: give 0 to {MOST} and 1 to {MOST}", "scale"
        )
    before = await read(redis, namespace)
    asked = msgspec.structs.replace(scale, serial=before.serial + 1 if before else 1)
    await redis.set(key(namespace), msgspec.msgpack.encode(asked))
    return asked


async def read(redis: Redis, namespace: str) -> Scale | None:
    """What was asked last; None when nobody asked, or another version wrote it."""
    raw = cast(Any, await redis.get(key(namespace)))
    try:
        return msgspec.msgpack.decode(raw, type=Scale) if raw else None
    except msgspec.MsgspecError:
        return None
