"""Which adapters a cluster serves beside its models, kept in Redis: routers write what operators ask, and read it.

Knows nothing of workers, files or who may ask. A name that was taken out stays as a note, so that a Redis that was
flushed can be told from one that is empty.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.protos.adapter_id import adapter_id
from baton.protos.errors import Unavailable

log = logging.getLogger("baton.cluster")

BY_CONFIG = "config"  # who asked for an adapter that the configuration names
NOTES = 1024  # names that were taken out and are still noted; beyond, the oldest notes go

# KEYS: hash; ARGV: name, the value that must be there ("" for none), the new value
_SWAP = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""
# KEYS: hash; ARGV: name, the value that it is to have, …: names that have another one meanwhile stay
_FORGET = """
for at = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[at]) == ARGV[at + 1] then redis.call('HDEL', KEYS[1], ARGV[at]) end
end
return 1
"""


class AdapterEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describes one adapter of ``model_id``; its files lie at ``path``.

    ``digest`` is of its content, "" as long as no worker has read the files. ``tenant`` alone may use it; "" lets
    everybody. ``pinned``: workers don't evict it. ``by`` asked for it, ``at`` seconds since 1970. ``removed``: it
    was taken out, also where the configuration names it.
    """

    name: str
    model_id: str
    path: str
    digest: str = ""
    tenant: str = ""
    pinned: bool = False
    by: str = ""
    at: float = 0.0
    removed: bool = False

    @property
    def adapter_id(self) -> str:
        """Returns the id by which the cluster knows this content; "" while the content is not known."""
        return adapter_id(self.name, self.digest) if self.digest else ""

    def is_like(self, other: AdapterEntry | None) -> bool:
        """Returns whether ``other`` is the same content in the same state."""
        return other is not None and (self.digest, self.removed) == (other.digest, other.removed)


class AdapterStore:
    """Keeps the adapters of one cluster."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._key = redis, f"{{{namespace}}}:adapters"

    async def all(self) -> dict[str, AdapterEntry]:
        """Returns every entry by name, with the notes of what was taken out. Raises RedisError and OSError."""
        rows = await cast(Awaitable[dict[bytes, bytes]], self._redis.hgetall(self._key))
        return {name.decode(): found for name, row in rows.items() if (found := _decoded(row)) is not None}

    async def swap(self, entry: AdapterEntry, before: AdapterEntry | None) -> bool:
        """Writes ``entry`` where the store still has what ``before`` says; returns whether it did.

        Raises Unavailable.
        """
        try:
            row = await cast(Awaitable[bytes | None], self._redis.hget(self._key, entry.name))
            known = _decoded(row) if row else None
            if known is not before and not (known is not None and known.is_like(before)):
                return False
            script = cast(Any, self._redis.eval(_SWAP, 1, self._key, entry.name, row or b"", _encoded(entry)))
            return bool(await script)
        except (RedisError, OSError) as error:
            raise Unavailable(
                "Redis is away: other routers would not hear of the adapter; try again", retry_after_s=1.0
            ) from error

    async def restore(self, entries: Iterable[AdapterEntry]) -> None:
        """Writes back what a flushed Redis has lost; a name that is there again stays as it is.

        Raises RedisError and OSError.
        """
        for entry in entries:
            await cast(Awaitable[int], self._redis.hsetnx(self._key, entry.name, _encoded(entry).decode()))

    async def forget_notes(self, entries: Iterable[AdapterEntry]) -> None:
        """Forgets the oldest of ``entries`` that were taken out, beyond NOTES, as far as they are still so.

        Raises RedisError and OSError.
        """
        notes = sorted((e for e in entries if e.removed), key=lambda e: (e.at, e.name))
        if len(notes) > NOTES:
            asked = [part for e in notes[: len(notes) - NOTES] for part in (e.name, _encoded(e))]
            await cast(Awaitable[int], self._redis.eval(_FORGET, 1, self._key, *asked))


def _encoded(entry: AdapterEntry) -> bytes:
    return msgspec.json.encode(entry)


def _decoded(row: bytes) -> AdapterEntry | None:
    try:
        return msgspec.json.decode(row, type=AdapterEntry)
    except msgspec.MsgspecError as error:
        log.warning("an adapter's entry is not readable: %s", error)
        return None
