"""The numbers of workers asked for per role, kept in Redis: `baton scale` writes them, the process that places
workers reads them.

Knows nothing of who places workers, nor whether there is room.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable
from typing import cast

import msgspec
import redis as blocking
from redis.asyncio import Redis
from redis.exceptions import RedisError, WatchError

from baton.cluster.roles import roles_key
from baton.protos.errors import ConfigError

MOST = 1024  # workers of a role, because a typing error shall not ask for a million
BY_CONFIG = "config"
PLACER_TTL_MS = 5_000  # how long a process that places workers counts as here; it says so with each look


class ScaleRequest(msgspec.Struct, frozen=True):
    """Asks for numbers of workers per role; ``serial`` rises with each request, so that the same numbers can be
    asked for again.

    ``by``: who asked; "" for an operator, ``BY_CONFIG`` for the configuration.
    """

    prefill: int
    decode: int
    serial: int = 0
    by: str = ""


def key(namespace: str) -> str:
    """Returns the Redis key of the namespace's scale request."""
    return f"{{{namespace}}}:scale"


def _placer_key(namespace: str) -> str:
    return f"{key(namespace)}:placer"


async def announce_placer(redis: Redis, namespace: str) -> None:
    """Says that a process follows the namespace's numbers of workers, for PLACER_TTL_MS."""
    await redis.set(_placer_key(namespace), b"1", px=PLACER_TTL_MS)


async def has_placer(redis: Redis, namespace: str) -> bool:
    """Returns whether any process follows the namespace's numbers of workers."""
    return bool(await redis.exists(_placer_key(namespace)))


async def was_placed(redis: Redis, namespace: str) -> bool:
    """Returns whether a process has placed the namespace's workers, whether or not it runs still."""
    return bool(await redis.exists(_planned_key(namespace)))


def slots_of(scale: ScaleRequest) -> dict[str, str]:
    """Returns slot -> planned role for the numbers asked for; a slot's current role may differ."""
    return {f"prefill-{i}": "prefill" for i in range(scale.prefill)} | {
        f"decode-{i}": "decode" for i in range(scale.decode)
    }


def require_possible(scale: ScaleRequest) -> None:
    """Raises ConfigError unless there are 0 to MOST prefill and 1 to MOST decode workers."""
    if not _can_be(scale):
        raise ConfigError(
            f"prefill={scale.prefill} decode={scale.decode}: give 0 to {MOST} and 1 to {MOST}", "scale"
        )


async def ask(
    redis: Redis,
    namespace: str,
    scale: ScaleRequest,
    present: ScaleRequest | None = None,
    after: int | None = None,
) -> ScaleRequest:
    """Writes the request with the next serial and returns it; new slots are given the role in their name.

    ``present`` says what runs if nothing was asked for before. With ``after``, nothing is written unless the last
    request has that serial (0: there is none); the last one is returned then. Raises ConfigError for impossible
    numbers.
    """
    require_possible(scale)
    while True:
        async with redis.pipeline(transaction=True) as pipe:
            await pipe.watch(key(namespace))
            before = _decoded(await cast(Awaitable[bytes | None], pipe.get(key(namespace))))
            if after is not None and after != (before.serial if before else 0):
                return before or present or scale
            asked = msgspec.structs.replace(scale, serial=before.serial + 1 if before else 1)
            known = slots_of(before or present or scale)
            fresh = {slot: role for slot, role in slots_of(asked).items() if slot not in known}
            pipe.multi()
            pipe.set(key(namespace), msgspec.msgpack.encode(asked))
            if fresh:
                pipe.hset(roles_key(namespace), mapping=dict(fresh.items()))
            with contextlib.suppress(WatchError):  # somebody else asked meanwhile: his serial comes first
                await pipe.execute()
                return asked


async def read(redis: Redis, namespace: str) -> ScaleRequest | None:
    """Returns the last request; None if there is none, or it is unreadable."""
    return _decoded(cast(bytes | None, await redis.get(key(namespace))))


async def begin(
    redis: Redis, namespace: str, planned: ScaleRequest, now: ScaleRequest | None = None
) -> ScaleRequest:
    """Returns the request in force when placement begins.

    That is the last one asked for, unless the configuration's numbers ``planned`` have changed since; then ``now``
    (default: ``planned``) is asked for.
    """
    numbers = f"{planned.prefill} {planned.decode}".encode()
    asked = await read(redis, namespace)
    if asked is not None and await redis.get(_planned_key(namespace)) == numbers:
        return asked
    asked = await ask(redis, namespace, msgspec.structs.replace(now or planned, by=BY_CONFIG), planned)
    await redis.set(_planned_key(namespace), numbers)
    return asked


class NumbersInForce:
    """Follows the numbers of workers that are in force, for one process that places workers.

    A Redis that lost them is told again.
    """

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._namespace = redis, namespace
        self._planned: ScaleRequest | None = None  # what Redis was told that the configuration says
        self._asked: ScaleRequest | None = None

    async def look(self, planned: ScaleRequest) -> ScaleRequest:
        """Returns the numbers in force; ``planned`` are the configuration's now. Raises RedisError, OSError."""
        await announce_placer(self._redis, self._namespace)
        same = planned == self._planned
        asked = await read(self._redis, self._namespace) if same else None
        if asked is None:
            now = self._asked if same else None
            asked, self._planned = await begin(self._redis, self._namespace, planned, now), planned
        self._asked = asked
        return asked


def forget_scale(url: str, namespace: str) -> None:
    """Deletes the request left by an earlier cluster of this namespace; ignores a Redis that is away."""
    with contextlib.suppress(RedisError, OSError), blocking.Redis.from_url(url, socket_timeout=2.0) as client:
        client.delete(key(namespace), _planned_key(namespace), _placer_key(namespace))


def _planned_key(namespace: str) -> str:
    return f"{key(namespace)}:planned"


def _can_be(scale: ScaleRequest) -> bool:
    return 0 <= scale.prefill <= MOST and 1 <= scale.decode <= MOST


def _decoded(raw: bytes | None) -> ScaleRequest | None:
    try:
        found = msgspec.msgpack.decode(raw, type=ScaleRequest) if raw else None
    except msgspec.MsgspecError:
        return None
    return found if found is not None and _can_be(found) else None
