"""The news of the membership: descriptions of workers that changed, which are few, without those that didn't.

Knows nothing of loads or of who is alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.membership import described, entry_prefix, news_key, set_key
from baton.protos.nouns import WorkerInfo

WHOLE_S = 30.0  # seconds after which all descriptions are read, because Redis may have lost some
# KEYS: set of ids, number of news; ARGV: entry key prefix, number that the reader knows. News are descriptions that
# a beat changed, and those of builds that don't number them.
_NEWS = """
local now = tonumber(redis.call('GET', KEYS[2]) or '0')
local known, found = tonumber(ARGV[2]), {}
if now == known then return {now, found} end
if now < known then known = -1 end
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local entry = redis.call('HMGET', ARGV[1] .. id, 'info', 'news')
  if entry[1] and tonumber(entry[2] or now) > known then found[#found + 1] = entry[1] end
end
return {now, found}
"""


class RosterNews:
    """Keeps the descriptions of all workers by reading those alone that changed since the last look.

    Whoever vanished without a word stays for up to WHOLE_S seconds, after which all are read again.
    """

    def __init__(self, redis: Redis, namespace: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._prefix = [set_key(namespace), news_key(namespace)], entry_prefix(namespace)
        self._script, self._clock = redis.register_script(_NEWS), clock
        self._infos: dict[str, WorkerInfo] = {}
        self._known, self._whole_at = -1, float("-inf")

    async def refresh(self) -> dict[str, WorkerInfo]:
        """Reads Redis now (one round trip) and returns the descriptions by worker id; the last ones if Redis is
        away.
        """
        whole = self._clock() - self._whole_at >= WHOLE_S
        try:
            args: list[str | int] = [self._prefix, -1 if whole else self._known]
            self._known, rows = await self._script(keys=self._keys, args=args)
        except (RedisError, OSError):
            return self._infos
        if whole:
            self._infos, self._whole_at = {}, self._clock()
        changed = [info for row in rows if (info := described(row)) is not None]
        self._infos |= {info.worker_id: info for info in changed}
        return self._infos
