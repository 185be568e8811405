"""The prefix index: which worker holds how many leading blocks of a chain of block hashes, kept in Redis as a hint.

Knows nothing of tokens or pages. Each worker has one set of 16-byte truncated hashes that expires with its lease; a
sentinel member (the incarnation) tells a set that is whole from one that was lost and must be published again.
Wrong answers cost hit rate, never correctness: the worker's own pool decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from redis.asyncio import Redis
from redis.exceptions import RedisError

HASH_BYTES = 16  # leading bytes of a block's hash that the index keeps
CHUNK = 4096  # hashes in one command; Lua's unpack stops below 8,000

# KEYS: set; ARGV: sentinel, lease ms, blob of added, blob of removed. 0: the set is not this incarnation's.
_CHANGE = """
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 0 then return 0 end
for i = 1, #ARGV[3], 16 do redis.call('SADD', KEYS[1], string.sub(ARGV[3], i, i + 15)) end
for i = 1, #ARGV[4], 16 do redis.call('SREM', KEYS[1], string.sub(ARGV[4], i, i + 15)) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
# KEYS: one set per worker; ARGV: blob of the chain. A cache drops tails first, so membership along a chain
# is true up to some block and false after it: binary search, log2(blocks) probes per worker; one probe where
# not even the first block is held, which is most workers most of the time. Workers share many probes.
_LONGEST = """
local held, probes = {}, {}
local blob, call, sub, floor = ARGV[1], redis.call, string.sub, math.floor
local first, blocks = sub(blob, 1, 16), #blob / 16
for w = 1, #KEYS do
  local key = KEYS[w]
  local low, high = call('SISMEMBER', key, first), blocks
  if low == 0 then high = 0 end
  while low < high do
    local mid = floor((low + high + 1) / 2)
    local probe = probes[mid]
    if not probe then
      probe = sub(blob, mid * 16 - 15, mid * 16)
      probes[mid] = probe
    end
    if call('SISMEMBER', key, probe) == 1 then low = mid else high = mid - 1 end
  end
  held[w] = low
end
return held
"""


def index_key(namespace: str, worker_id: str) -> str:
    """Returns the Redis key of the worker's set of block hashes."""
    return f"{{{namespace}}}:prefix:{worker_id}"


def truncated(hashes: Sequence[bytes]) -> bytes:
    """Returns the first HASH_BYTES bytes of each hash, concatenated.

    Fastest if all hashes have 2 * HASH_BYTES bytes.
    """
    whole = b"".join(hashes)
    if len(whole) != 2 * HASH_BYTES * len(hashes):
        return b"".join([h[:HASH_BYTES] for h in hashes])
    return np.frombuffer(whole, f"V{HASH_BYTES}")[::2].tobytes()


class PrefixPublisher:
    """Publishes the block hashes that a worker has cached: ``publish`` collects changes, ``flush`` writes them in
    one round trip.
    """

    def __init__(self, redis: Redis, namespace: str, worker_id: str, incarnation: str, ttl_s: float) -> None:
        self._redis, self._key = redis, index_key(namespace, worker_id)
        self._sentinel = b"incarnation:" + incarnation.encode()
        self._ttl_ms = int(ttl_s * 1000)
        self._change = redis.register_script(_CHANGE)
        self._held: set[bytes] = set()
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()

    def publish(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Notes block hashes, full or truncated, that entered and left the worker's cache."""
        gone, new = {h[:HASH_BYTES] for h in removed}, {h[:HASH_BYTES] for h in added}
        self._held -= gone  # in place: it holds every block of the cache, and changes come ten times a second
        self._held |= new
        self._removed = (self._removed | gone) - new
        self._added = (self._added - gone) | new

    @property
    def held(self) -> tuple[bytes, ...]:
        """Returns the truncated hashes of all blocks published and not removed; a worker's successor publishes them
        first.
        """
        return tuple(self._held)

    async def flush(self) -> None:
        """Writes the changes to Redis and renews the set's expiry; writes all hashes if the set was lost.

        Raises RedisError and OSError.
        """
        added, removed = self._added, self._removed
        self._added, self._removed = set(), set()
        try:
            if not await self._change_set(added, removed):
                await self._write_all()
        except (RedisError, OSError):
            # Unknown what arrived: drop the sentinel's trust by publishing all at the next flush.
            self._sentinel_lost()
            raise

    async def clear(self) -> None:
        """Deletes the worker's set from Redis. Raises RedisError and OSError."""
        await self._redis.delete(self._key)

    async def _change_set(self, added: set[bytes], removed: set[bytes]) -> bool:
        args: list[bytes | int] = [self._sentinel, self._ttl_ms, b"".join(added), b"".join(removed)]
        return bool(await self._change(keys=[self._key], args=args))

    async def _write_all(self) -> None:
        held = list(self._held)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._key)
            pipe.sadd(self._key, self._sentinel)
            for at in range(0, len(held), CHUNK):
                pipe.sadd(self._key, *held[at : at + CHUNK])
            pipe.pexpire(self._key, self._ttl_ms)
            await pipe.execute()

    def _sentinel_lost(self) -> None:
        """A new sentinel: the set in Redis, whatever it holds, no longer passes for ours."""
        stem, _, count = self._sentinel.partition(b"#")
        self._sentinel = stem + b"#" + str(int(count or b"0") + 1).encode()


class PrefixIndex:
    """Looks up the index, as routers do."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._namespace = namespace
        self._longest = redis.register_script(_LONGEST)

    async def longest(self, workers: Sequence[str], hashes: Sequence[bytes] | bytes) -> dict[str, int]:
        """Returns the number of leading blocks of the chain that each worker holds, by worker id; {} if Redis is
        away. One round trip.

        ``hashes`` are a list, or concatenated by ``truncated``.
        """
        if not workers or not hashes:
            return dict.fromkeys(workers, 0)
        keys = [index_key(self._namespace, w) for w in workers]
        try:
            chain = hashes if isinstance(hashes, bytes) else truncated(hashes)
            held = await self._longest(keys=keys, args=[chain])
        except (RedisError, OSError):
            return {}
        return dict(zip(workers, held, strict=True))
