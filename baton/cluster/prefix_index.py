"""The prefix index: which worker holds how many leading blocks of a chain of block hashes, kept in Redis as a hint.

Knows nothing of tokens or pages. Each worker has one set of 16-byte truncated hashes that expires with its lease; a
sentinel member (the incarnation) tells a set that is whole from one that was lost and must be published again.
Wrong answers cost hit rate, never correctness: the worker's own pool decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np
from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

HASH_BYTES = 16  # leading bytes of a block's hash that the index keeps
CHUNK = 4096  # hashes in one script: Redis answers nobody meanwhile, and this process packs no more at a time
CHUNKS = 16  # scripts of a set that is written anew in one flush, because the next heartbeat waits for it
FLUSH_S = 1.0  # seconds after which a flush begins no further script: a heartbeat lasts five times that

Argument = bytes | str | int  # of a script
Write = Callable[[list[bytes], list[bytes]], Awaitable[bool]]  # adds and removes hashes; False: the set was lost

# The end of a script. KEYS: set, …; ARGV: sentinel, lease ms, blob of added, blob of removed, … 0: the set is not
# this incarnation's.
CHANGE = """
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
    """Publishes the block hashes that a worker has cached: ``publish`` collects changes, ``flush`` writes them.

    A set that was lost is written anew, over several flushes if it is large. Changes that can't be written are kept
    up to CHUNK * CHUNKS of them; beyond that the set is written anew, too.
    """

    def __init__(self, redis: Redis, namespace: str, worker_id: str, incarnation: str, ttl_s: float) -> None:
        self._redis, self.key = redis, index_key(namespace, worker_id)
        self._sentinel = b"incarnation:" + incarnation.encode()
        self._ttl_ms = int(ttl_s * 1000)
        self._change = redis.register_script(CHANGE)
        self._held: set[bytes] = set()
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()
        self._begun = False  # the set in Redis is of this sentinel, for all we know
        self._rest: list[bytes] = []  # what a set that is written anew still lacks
        self._turn = asyncio.Lock()

    def publish(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Notes block hashes, full or truncated, that entered and left the worker's cache."""
        gone, new = {h[:HASH_BYTES] for h in removed}, {h[:HASH_BYTES] for h in added}
        # In place: they hold every block of the cache, or all changes of a time, and come ten times a second.
        self._held -= gone
        self._held |= new
        self._removed |= gone
        self._removed -= new
        self._added -= gone
        self._added |= new
        if len(self._added) + len(self._removed) > CHUNK * CHUNKS:
            self._distrust()

    @property
    def held(self) -> tuple[bytes, ...]:
        """Returns the truncated hashes of all blocks published and not removed; a worker's successor publishes them
        first.
        """
        return tuple(self._held)

    async def flush(self) -> None:
        """Writes the changes to Redis and renews the set's expiry; begins to write all hashes if the set was lost,
        or goes on with that.

        Raises RedisError and OSError.
        """
        await self._flush_alone(None)

    async def flush_by(self, script: AsyncScript, keys: Sequence[str], args: Sequence[Argument]) -> None:
        """Does what ``flush`` does, whose first changes go by ``script``: it ends with CHANGE, and takes ``keys``
        and ``args`` beside its own, so that both are one round trip.

        Raises RedisError and OSError.
        """
        await self._flush_alone(partial(self._write_by, script, keys, args))

    @property
    def busy(self) -> bool:
        """Returns whether a flush is under way, for whose end another waits."""
        return self._turn.locked()

    async def _flush_alone(self, first: Write | None) -> None:
        async with self._turn:
            try:
                await self._flush(first)
            except BaseException:  # unknown what arrived
                self._distrust()
                raise

    async def clear(self) -> None:
        """Deletes the worker's set from Redis. Raises RedisError and OSError."""
        await self._redis.delete(self.key)

    async def _flush(self, first: Write | None) -> None:
        until = asyncio.get_running_loop().time() + FLUSH_S
        added, removed = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        if not self._begun:
            if first is not None:
                await first([], [])
            await self._begin()
        elif not await self._changed(added, removed, until, first or self._write):
            await self._begin()
        for number in range(CHUNKS):
            if not self._rest or (number and asyncio.get_running_loop().time() > until):
                return
            part = [h for h in self._rest[-CHUNK:] if h in self._held]  # some have gone since
            del self._rest[-CHUNK:]
            if not await self._write(part, []):
                return  # lost meanwhile; the next flush begins again

    async def _changed(self, added: list[bytes], removed: list[bytes], until: float, first: Write) -> bool:
        """Writes changes, or renews the expiry if there are none, by ``first`` to begin with; returns False if the
        set was lost.

        Those that ``until`` leaves no time for are kept for the next flush.
        """
        for at in range(0, max(len(added), len(removed), 1), CHUNK):
            if at and asyncio.get_running_loop().time() > until:
                self._added.update(h for h in added[at:] if h in self._held)
                self._removed.update(h for h in removed[at:] if h not in self._held)
                break
            write = self._write if at else first
            if not await write(added[at : at + CHUNK], removed[at : at + CHUNK]):
                return False
        return True

    async def _write(self, added: list[bytes], removed: list[bytes]) -> bool:
        return await self._write_by(self._change, (), (), added, removed)

    async def _write_by(
        self,
        script: AsyncScript,
        keys: Sequence[str],
        args: Sequence[Argument],
        added: list[bytes],
        removed: list[bytes],
    ) -> bool:
        own: list[Argument] = [self._sentinel, self._ttl_ms, b"".join(added), b"".join(removed)]
        return bool(await script(keys=[self.key, *keys], args=[*own, *args]))

    async def _begin(self) -> None:
        """Replaces whatever is in Redis by an empty set of this sentinel."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self.key)
            pipe.sadd(self.key, self._sentinel)
            pipe.pexpire(self.key, self._ttl_ms)
            await pipe.execute()
        self._begun, self._rest = True, list(self._held)

    def _distrust(self) -> None:
        """Takes a new sentinel: the set in Redis, whatever it holds, no longer passes for ours."""
        stem, _, count = self._sentinel.partition(b"#")
        self._sentinel = stem + b"#" + str(int(count or b"0") + 1).encode()
        self._begun, self._rest = False, []
        self._added.clear()
        self._removed.clear()


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
