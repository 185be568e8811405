"""The registry of LoRA adapters that a cluster serves, kept in Redis: routers write what operators ask for, and
read it.

Knows nothing of workers, files or who may ask. A removed name stays as a note, so that a Redis that was flushed can
be told from one that is empty.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable
from typing import cast

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
    """Describes one adapter of model ``model_id``; its files lie at ``path``.

    ``digest`` is of its content, "" until a worker has read the files. Only ``tenant`` may use it; "": everybody.
    ``pinned``: workers don't evict it. ``by`` asked for it ``at`` Unix seconds. ``removed``: an operator removed
    it, even if the configuration names it.
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
        """Returns the id of the adapter's content, made of name and digest; "" while the digest is unknown."""
        return adapter_id(self.name, self.digest) if self.digest else ""

    def is_like(self, other: AdapterEntry | None) -> bool:
        """Returns whether ``other`` has the same content and is removed or not likewise."""
        return other is not None and (self.digest, self.removed) == (other.digest, other.removed)


class AdapterStore:
    """Keeps the adapter registry of one cluster in Redis."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._key = redis, f"{{{namespace}}}:adapters"

    async def all(self) -> dict[str, AdapterEntry]:
        """Returns every entry by name, removed ones included. Raises RedisError and OSError."""
        rows = await cast(Awaitable[dict[bytes, bytes]], self._redis.hgetall(self._key))
        return {name.decode(): found for name, row in rows.items() if (found := _decoded(row)) is not None}

    async def swap(self, entry: AdapterEntry, before: AdapterEntry | None) -> bool:
        """Writes ``entry`` if the store still has ``before`` (None: no entry) under its name; returns whether it
        did.

        Raises Unavailable.
        """
        try:
            row = await cast(Awaitable[bytes | None], self._redis.hget(self._key, entry.name))
            known = _decoded(row) if row else None
            if known is not before and not (known is not None and known.is_like(before)):
                return False
            script = self._redis.eval(_SWAP, 1, self._key, entry.name, row or b"", _encoded(entry))
            return bool(await cast(Awaitable[int], script))
        except (RedisError, OSError) as error:
            raise Unavailable(
                "Redis is away: other routers would not hear of the adapter; try again", retry_after_s=1.0
            ) from error

    async def restore(self, entries: Iterable[AdapterEntry]) -> None:
        """Writes ``entries`` to a Redis that lost them; names that have an entry are left as they are.

        Raises RedisError and OSError.
        """
        for entry in entries:
            await cast(Awaitable[int], self._redis.hsetnx(self._key, entry.name, _encoded(entry).decode()))

    async def forget_notes(self, entries: Iterable[AdapterEntry]) -> None:
        """Deletes the oldest removed ones of ``entries`` beyond NOTES, unless they were changed meanwhile.

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
