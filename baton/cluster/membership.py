"""Cluster membership: a worker's lease and heartbeat in Redis, and the router's view of all workers.

Knows nothing of connections to workers: a missing entry is a hint, never proof that a worker is dead. An entry's
age is measured by Redis's clock alone (what is left of its lease), plus the reader's own since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from redis import DriverInfo
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from baton.cluster.departures import KEPT, Departure, Departures
from baton.cluster.prefix_index import CHANGE, Argument, PrefixPublisher
from baton.cluster.store.connections import MOST, CancellableConnection, ReloadingConnection, WaitingPool
from baton.cluster.store.patience import CircuitBreaker
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import WorkerInfo
from baton.protos.rpc import heed_cancel
from baton.tasks.lasting import count_failure, lasting

log = logging.getLogger("baton.cluster")

LEASE_S = 5.0  # seconds that an entry lasts without a beat
BEAT_S = 0.5  # seconds between two beats: ten fit a lease
FORGET_S = 10.0  # seconds without a heartbeat after which a reader forgets a worker
LEFT = "left"
# Seconds that a worker which leaves waits for Redis, over all that it has to say, because it isn't asked again.
LAST_WORDS_S, SILENT_S = 1.0, 60.0
CANCEL_AGAIN_S = 0.2  # seconds until a task is cancelled again, because redis-py may lose the first time

# KEYS: set of blocks, set of ids, entry, number of news; ARGV: those of CHANGE, id, info, load
_ENTRY = """
local before = redis.call('HGET', KEYS[3], 'info')
redis.call('SADD', KEYS[2], ARGV[5])
redis.call('HSET', KEYS[3], 'info', ARGV[6], 'load', ARGV[7], 'lease_ms', ARGV[2])
if before ~= ARGV[6] then redis.call('HSET', KEYS[3], 'news', redis.call('INCR', KEYS[4])) end
redis.call('PEXPIRE', KEYS[3], ARGV[2])
"""
# KEYS: set of ids; ARGV: entry key prefix. Ids whose lease ran out leave the set here.
_ROSTER = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local entry = redis.call('HMGET', ARGV[1] .. id, 'info', 'load', 'lease_ms')
  if entry[1] then
    found[#found + 1] = {id, entry[1], entry[2], tonumber(entry[3]) - redis.call('PTTL', ARGV[1] .. id)}
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return found
"""


class WorkerEntry(NamedTuple):
    """Describes one worker as it last described itself; ``age_s`` is the seconds since its last heartbeat."""

    info: WorkerInfo
    load: WorkerLoad
    age_s: float


def connect(url: str, kind: type[AbstractConnection] | None = None) -> Redis:
    """Returns a Redis client whose calls time out within seconds.

    ``kind`` is the class of its connections, by default the one that ``url`` asks for.
    """
    options = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0, "health_check_interval": 0}
    pool = WaitingPool.from_url(url, max_connections=MOST, driver_info=DriverInfo(), **options)
    kind = kind or (ReloadingConnection if url.startswith("rediss://") else pool.connection_class)
    pool.connection_class = type(f"Heeding{kind.__name__}", (CancellableConnection, kind), {})
    return Redis.from_pool(pool)


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancels ``task`` repeatedly until it has ended, because a cancellation during a Redis call may be lost."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)


def set_key(namespace: str) -> str:
    """Returns the Redis key of the set of worker ids."""
    return f"{{{namespace}}}:workers"


def news_key(namespace: str) -> str:
    """Returns the Redis key of the number by which changed descriptions of workers are counted."""
    return f"{{{namespace}}}:workers:news"


def entry_prefix(namespace: str) -> str:
    """Returns the Redis key prefix of workers' hashes, to which the worker id is appended."""
    return f"{{{namespace}}}:worker:"


class Membership:
    """Keeps a worker's own entry in Redis; as an async context manager it joins, sends heartbeats, and leaves at
    the end.

    Set ``load`` (and ``info``) whenever they change; the next heartbeat carries them. ``look``, if set, is called
    before each to do so. While Redis is away each heartbeat retries; everything is published again once it is back.
    ``connected`` says whether the last heartbeat reached Redis.
    """

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        info: WorkerInfo,
        ttl_s: float = LEASE_S,
        beat_s: float = BEAT_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.info = info
        self.load = WorkerLoad()
        self.index = PrefixPublisher(redis, namespace, info.worker_id, info.incarnation, ttl_s)
        self._redis, self._namespace = redis, namespace
        self._departures = Departures(redis, namespace, wall_clock)
        self._ttl_ms, self._beat_s, self._wall_clock = int(ttl_s * 1000), beat_s, wall_clock
        self._beat_script = redis.register_script(_ENTRY + CHANGE)
        self._entry_script = redis.register_script(_ENTRY + "return 1")
        self._last_words = CircuitBreaker(LAST_WORDS_S, SILENT_S, lambda: asyncio.get_running_loop().time())
        self.look: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None
        self.connected = True

    def publish(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Notes block hashes that entered and left this worker's prefix cache, to be published with the next
        heartbeat.
        """
        self.index.publish(added, removed)

    async def beat(self) -> bool:
        """Writes the entry and the pending changes of the prefix index now; returns False if Redis is away."""
        try:
            if self.index.busy:  # which may take a second
                await self._write(self.info)
                await self.index.flush()
            else:
                await self.index.flush_by(self._beat_script, self._keys(), self._entry(self.info))
        except (RedisError, OSError) as error:
            self._note(False, error)
            return False
        self._note(True)
        return True

    async def announce_end(self, info: WorkerInfo) -> None:
        """Tells routers ``info``, which says that the worker drains, unless Redis is late."""
        self.info = info
        await self._say_last("drains", self.beat)

    async def depart(self, cause: str, detail: str) -> None:
        """Records why the worker leaves; it stays a member until ``leave``."""
        info, at = self.info, self._wall_clock()
        left = Departure(info.worker_id, info.incarnation, info.role, cause, detail, at, info.model_id)
        await self._say_last(cause, partial(self._departures.write, left))

    async def leave(self) -> None:
        """Marks the entry as left, so that routers drop the worker at their next poll instead of when its lease
        expires.
        """
        await self._say_last(LEFT, self._leave)

    async def _leave(self) -> None:
        await self._write(msgspec.structs.replace(self.info, state=LEFT))
        await self.index.clear()

    async def _say_last(self, what: str, say: Callable[[], Awaitable[object]]) -> None:
        """Has ``say`` tell Redis one of the last things. A Redis that hangs must not use up the time in which the
        worker's requests end and its ports close.
        """
        try:
            await self._last_words.ask(say)
        except (TimeoutError, RedisError, OSError) as error:
            log.info("Redis isn't told of %s that it %s: %s", self.info.worker_id, what, error or "it is late")

    async def __aenter__(self) -> Membership:
        await self.beat()
        self._task = lasting(self._run, "membership")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            await end_task(self._task)
        await self.leave()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                self.look()
            except Exception:  # the heartbeat says what the one before it said
                log.exception("the load could not be looked at")
                count_failure("membership")
            try:
                await self.beat()
            except Exception:  # one that stops beating is gone for every router that starts later
                log.exception("a heartbeat failed")
                count_failure("membership")
            heed_cancel()

    async def _write(self, info: WorkerInfo) -> None:
        unchanged: list[Argument] = ["", self._ttl_ms, "", ""]
        await self._entry_script(keys=[self.index.key, *self._keys()], args=[*unchanged, *self._entry(info)])

    def _keys(self) -> tuple[str, str, str]:
        own = self._namespace
        return set_key(own), entry_prefix(own) + self.info.worker_id, news_key(own)

    def _entry(self, info: WorkerInfo) -> tuple[Argument, ...]:
        return info.worker_id, msgspec.msgpack.encode(info), msgspec.msgpack.encode(self.load)

    def _note(self, up: bool, error: Exception | None = None) -> None:
        if up != self.connected:
            log.warning("Redis is %s", "back" if up else f"away ({error}); serving goes on")
        self.connected = up


class PolledRoster:
    """Reads all workers' entries from Redis, every ``poll_s`` seconds as an async context manager; keeps the last
    view while Redis is away.

    An entry that Redis no longer lists (a flush, a late heartbeat) stays until ``forget_s`` seconds without a
    heartbeat. ``connected`` says whether the last read succeeded.
    """

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        poll_s: float = BEAT_S,
        forget_s: float = FORGET_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._redis, self._namespace, self._wall_clock = redis, namespace, wall_clock
        self._poll_s, self._forget_s, self._clock = poll_s, forget_s, clock
        self._script = redis.register_script(_ROSTER)
        self._seen: dict[str, tuple[WorkerInfo, WorkerLoad, float]] = {}
        self._infos: dict[bytes, WorkerInfo] = {}  # of the last read, by their bytes
        self._missed: list[Departure] = []
        self._task: asyncio.Task[None] | None = None
        self.connected = True
        self._away_since = 0.0

    @property
    def away_s(self) -> float | None:
        """Returns the seconds since Redis was first found away; None while it answers."""
        return None if self.connected else self._clock() - self._away_since

    def snapshot(self) -> dict[str, WorkerEntry]:
        """Returns the entries as last read, by worker id; never waits."""
        now = self._clock()
        return {name: WorkerEntry(info, load, now - beat) for name, (info, load, beat) in self._seen.items()}

    def missed(self) -> list[Departure]:
        """Returns the departures of workers that disappeared without notice since the last call."""
        found, self._missed = self._missed, []
        return found

    async def refresh(self) -> dict[str, WorkerEntry]:
        """Reads Redis now (one round trip) and returns the entries by worker id; the last view if Redis is away."""
        try:
            rows = await self._script(keys=[set_key(self._namespace)], args=[entry_prefix(self._namespace)])
        except (RedisError, OSError) as error:
            self._note(False, error)
        else:
            self._note(True)
            self._take(rows)
        return self.snapshot()

    async def __aenter__(self) -> PolledRoster:
        await self.refresh()
        self._task = lasting(self._run, "roster")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            await end_task(self._task)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.refresh()
            except Exception:  # one that stops looking never hears of a worker that came back
                log.exception("the roster could not be read")
                count_failure("roster")
            heed_cancel()

    def _take(self, rows: Sequence[tuple[bytes, bytes, bytes, int]]) -> None:
        now, known = self._clock(), self._infos
        self._infos = {}
        for raw_id, raw_info, raw_load, age_ms in rows:
            entry = _decode(raw_info, raw_load, known.get(raw_info))
            if entry is None:
                continue
            self._infos[raw_info] = entry[0]
            if entry[0].state == LEFT:
                self._seen.pop(raw_id.decode(), None)
            else:
                self._notice(self._seen.get(raw_id.decode()), entry[0])
                self._seen[raw_id.decode()] = (*entry, now - max(0, age_ms) / 1000)
        for info, _, beat in self._seen.values():
            if now - beat >= self._forget_s:
                self._miss(info, "lease_lost", f"no heartbeat for {now - beat:.0f} s")
        self._seen = {name: seen for name, seen in self._seen.items() if now - seen[2] < self._forget_s}

    def _notice(self, before: tuple[WorkerInfo, WorkerLoad, float] | None, info: WorkerInfo) -> None:
        """One that served has another incarnation in its place, and didn't drain for it."""
        if before is not None and before[0].incarnation != info.incarnation and before[0].state == "ready":
            self._miss(before[0], "replaced", f"incarnation {info.incarnation} took its place")

    def _miss(self, info: WorkerInfo, cause: str, detail: str) -> None:
        at = self._wall_clock()
        gone = Departure(info.worker_id, info.incarnation, info.role, cause, detail, at, info.model_id)
        self._missed = [*self._missed[1 - KEPT :], gone]

    def _note(self, up: bool, error: Exception | None = None) -> None:
        if up != self.connected:
            log.warning("Redis is %s", "back" if up else f"away ({error}); keeping the last view of the workers")
            self._away_since = self._clock()
        self.connected = up


def _decode(info: bytes, load: bytes, known: WorkerInfo | None) -> tuple[WorkerInfo, WorkerLoad] | None:
    """Returns an entry, with the description ``known`` of the same bytes; None for one that can't be read."""
    known = known or described(info)
    try:
        return None if known is None else (known, msgspec.msgpack.decode(load, type=WorkerLoad))
    except msgspec.MsgspecError as error:
        log.warning("an entry of the membership is not readable: %s", error)
        return None


def described(info: bytes) -> WorkerInfo | None:
    """Returns the description that an entry has; None, with a line in the log, if another version wrote one that
    doesn't fit ours.
    """
    try:
        return msgspec.msgpack.decode(info, type=WorkerInfo)
    except msgspec.MsgspecError as error:
        log.warning("an entry of the membership is not readable: %s", error)
        return None
