"""Records that every router of a cluster can read, kept in Redis for a while, the newest of them.

Knows nothing of what a record says. What can't be written is dropped. Redis evicts nothing, so records keep to a
share of its memory: the oldest are deleted.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.store.room import RedisMemory

KEPT_S = 3600  # seconds that decision records are kept: an hour
MAX_ID = 256  # characters of an id that is looked up
MOST_BYTES, MOST_SHARE = 64 << 20, 1 / 8  # of all records, and of the store's memory
AT_ONCE = 256  # records in a script, which Redis runs without pausing
# KEYS: records' ids ("size:id" by when they were written), their bytes; ARGV: prefix, ms that they are kept, most
# bytes, then ids and records in turn. A size is a record's own and that of its key and its place in the list.
_PUT = """
local clock = redis.call('TIME')
local now, held = clock[1] * 1000 + math.floor(clock[2] / 1000), tonumber(redis.call('GET', KEYS[2]) or 0)
for at = 4, #ARGV, 2 do
  local key, size = ARGV[1] .. ARGV[at], 200 + 2 * #ARGV[at] + #ARGV[at + 1]
  local old = 200 + 2 * #ARGV[at] + redis.call('STRLEN', key)
  if redis.call('ZREM', KEYS[1], old .. ':' .. ARGV[at]) == 1 then held = held - old end
  redis.call('SET', key, ARGV[at + 1], 'PX', ARGV[2])
  redis.call('ZADD', KEYS[1], now, size .. ':' .. ARGV[at])
  held = held + size
end
while true do
  local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  if not first[1] then held = 0 break end
  if held <= tonumber(ARGV[3]) and tonumber(first[2]) > now - ARGV[2] then break end
  local size, id = string.match(first[1], '^(%d+):(.*)$')
  redis.call('ZREM', KEYS[1], first[1])
  redis.call('DEL', ARGV[1] .. id)
  held = held - size
end
redis.call('SET', KEYS[2], held, 'PX', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return held
"""
log = logging.getLogger("baton.cluster")


class RecordStore:
    """Keeps records, bytes by id, under ``{namespace}:request:``, for ``kept_s`` seconds and at most ``most_bytes``
    in all.
    """

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        kept_s: float = KEPT_S,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis, self._prefix, self._kept_ms = redis, f"{{{namespace}}}:request:", int(kept_s * 1000)
        self._keys = [f"{{{namespace}}}:requests:list", f"{{{namespace}}}:requests:bytes"]
        self._script, self._room, self._most = redis.register_script(_PUT), RedisMemory(redis, clock), most_bytes
        self._up = True

    async def put(self, records: Mapping[str, bytes]) -> None:
        """Stores ``records`` by id and deletes the oldest beyond this store's share; drops them if Redis is
        away.
        """
        try:
            limit = await self._room.most()
            most = min(self._most, int(limit * MOST_SHARE)) if limit else self._most
            rows = iter(records.items())
            while some := list(itertools.islice(rows, AT_ONCE)):
                pairs = [part for pair in some for part in pair]
                args = [self._prefix, self._kept_ms, most, *pairs]
                await self._script(keys=self._keys, args=args)
        except (TimeoutError, RedisError, OSError) as error:
            self._note(False, error)
        else:
            self._note(True)

    async def get(self, key: str) -> bytes | None:
        """Returns one record; None if there is none, or Redis is away."""
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
