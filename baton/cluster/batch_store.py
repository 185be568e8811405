"""Files and batch jobs, kept in Redis so that every router serves them and any router can go on with a job.

Knows nothing of HTTP or of what a line asks for. Unlike the rest of this folder it is no hint: a job's state
lives here alone, so a Redis that can't be reached is an error the caller hears of.

    job: open ──claim (a lease, renewed)──> lines answered one by one ──> closed
                 └ the router dies: the lease runs out, another one claims and answers what is left

Every claim has a number, one higher than the claim before. What a claim's holder writes is written only while no
later claim was given (one script checks and writes), so a holder that paused can't undo what its successor did.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, RedisError

from baton.cluster.store.room import ANSWERS, COPIES, UPLOADS, RedisMemory
from baton.protos.errors import InvalidRequest, StorageFull, Unavailable

KEPT_S = 7 * 86_400
JOB_BYTES = 4096  # of a job's state, about
# KEYS: owner, fence, open jobs; ARGV: job, who, lease ms, seconds that the job is kept. The claim's number; 0 where
# another has the job, or it is closed.
_CLAIM = """
if redis.call('SISMEMBER', KEYS[3], ARGV[1]) == 0 or redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local number = redis.call('INCR', KEYS[2])
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return number
"""
# What the scripts below begin with. KEYS: fence, …; ARGV: the claim's number, …. 0: a later claim was given.
_FENCE = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end\n"
# KEYS: fence, owner, open jobs; ARGV: number, job, who, lease ms, seconds that the job is kept.
_RENEW = f"""{_FENCE}
if redis.call('SISMEMBER', KEYS[3], ARGV[2]) == 0 then return 0 end
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return 1
"""
# KEYS: fence, owner; ARGV: number.
_RELEASE = f"{_FENCE} redis.call('DEL', KEYS[2]) return 1"
# KEYS: fence, answers; ARGV: number, line, answer, seconds that it is kept.
_ANSWER = f"""{_FENCE}
redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
"""
# KEYS: fence, job; ARGV: number, state, seconds that it is kept.
_UPDATE = f"{_FENCE} redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3]) return 1"
# KEYS: fence, job, open jobs, answers, bad answers; ARGV: number, state, seconds that it is kept, job's id. Done
# again it changes nothing: nobody can claim a job that isn't open.
_CLOSE = f"""{_FENCE}
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call('SREM', KEYS[3], ARGV[4])
redis.call('DEL', KEYS[4], KEYS[5])
return 1
"""
# KEYS: file, list of all, of the tenant, its kept files (id:bytes by when they go), their bytes; fence, if any.
# ARGV: id, bytes, created, seconds that it is kept, most bytes (-1: any), about, content, claim's number. The bytes
# kept already where it would be too much, else -1; -2: a later claim was given.
_ADD = """
if KEYS[6] and redis.call('GET', KEYS[6]) ~= ARGV[8] then return -2 end
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', ARGV[3])) do
  redis.call('ZREM', KEYS[4], gone)
  redis.call('DECRBY', KEYS[5], string.match(gone, ':(%d+)$'))
end
local kept, most = tonumber(redis.call('GET', KEYS[5]) or 0), tonumber(ARGV[5])
if most >= 0 and kept + ARGV[2] > most then return kept end
redis.call('HSET', KEYS[1], 'about', ARGV[6], 'content', ARGV[7])
for list = 2, 3 do
  redis.call('ZREMRANGEBYSCORE', KEYS[list], '-inf', ARGV[3] - ARGV[4])
  redis.call('ZADD', KEYS[list], ARGV[3], ARGV[1])
end
local new = redis.call('ZADD', KEYS[4], ARGV[3] + ARGV[4], ARGV[1] .. ':' .. ARGV[2])
if new == 1 then redis.call('INCRBY', KEYS[5], ARGV[2]) end
for key = 1, 5 do redis.call('EXPIRE', KEYS[key], ARGV[4]) end
return -1
"""
# KEYS as above; ARGV: id, bytes.
_DROP = """
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
if redis.call('ZREM', KEYS[4], ARGV[1] .. ':' .. ARGV[2]) == 1 then redis.call('DECRBY', KEYS[5], ARGV[2]) end
return 1
"""


class StoredFile(msgspec.Struct, frozen=True):
    """Describes a stored file beside its bytes. ``created`` in seconds of the wall clock."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created: int


class BatchJob(msgspec.Struct, frozen=True):
    """Describes one batch job.

    Times in seconds of the wall clock, 0: not yet. ``key`` is the caller's key as JSON, or empty.
    """

    id: str
    tenant: str
    endpoint: str
    input_file: str
    window: str
    total: int
    created: int
    key: str = ""
    metadata: dict[str, str] = {}
    status: str = "validating"
    completed: int = 0
    failed: int = 0
    started: int = 0
    ended: int = 0
    cancelled: int = 0
    output_file: str = ""
    error_file: str = ""
    errors: tuple[dict[str, Any], ...] = ()


class JobClaim(NamedTuple):
    """One router's right to work on a job: ``number`` rises with every claim that is given."""

    job_id: str
    owner: str
    number: int


class JobClaimLost(Exception):
    """Another router has the job, or it is closed: nothing was written."""


class ListPage(msgspec.Struct, frozen=True):
    """A page of a list: of one tenant's, or of all for None; ``limit`` that follow ``after``, an id."""

    tenant: str | None = None
    after: str = ""
    limit: int = 20


class BatchStore:
    """Under ``{namespace}:file:`` and ``{namespace}:batch:``. Every method raises Unavailable without Redis.

    Names with a colon are our own, so an id that has one is nobody's.
    """

    def __init__(
        self, redis: Redis, namespace: str, kept_s: int = KEPT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis, self._kept_s = redis, kept_s
        self._files, self._jobs = f"{{{namespace}}}:file:", f"{{{namespace}}}:batch:"
        self._open = self._jobs + "list:open"
        self._claim, self._renew = redis.register_script(_CLAIM), redis.register_script(_RENEW)
        self._release, self._answer = redis.register_script(_RELEASE), redis.register_script(_ANSWER)
        self._update, self._close = redis.register_script(_UPDATE), redis.register_script(_CLOSE)
        self._add, self._drop = redis.register_script(_ADD), redis.register_script(_DROP)
        self._room = RedisMemory(redis, clock)

    async def has_room(self, size: int, share: float = ANSWERS) -> bool:
        """Returns whether the store can take ``size`` bytes more and keep what is not for files free."""
        async with _reached():
            return await self._room.has(size, share)

    # ---- files -------------------------------------------------------------------------------------

    async def add_file(self, file: StoredFile, content: bytes, most_bytes: int = -1) -> int | None:
        """Keeps a file; or, where its tenant's would be over ``most_bytes`` then, say how many there are.

        Raises StorageFull where the store has no room for it.
        """
        async with _reached():
            if not await self._room.has(len(content), UPLOADS):
                left = max(0, await self._room.left(UPLOADS) or 0) // COPIES
                raise StorageFull(
                    f"the cluster's store has room for {left} bytes of files and this one has {file.bytes}: delete "
                    "files that are no longer needed, or give Redis more memory (maxmemory)",
                    "file",
                )
            kept = await self._write(file, content, most_bytes)
        return None if kept < 0 else kept

    async def add_output(self, claim: JobClaim, file: StoredFile, content: bytes) -> None:
        """Keeps a file of a job's answers; the same file again changes nothing. Raises ClaimLost."""
        async with _reached():
            if await self._write(file, content, -1, claim) == -2:
                raise JobClaimLost(claim.job_id)

    async def _write(self, file: StoredFile, content: bytes, most_bytes: int, claim: JobClaim | None = None) -> int:
        args: list[str | bytes | float] = [
            file.id,
            file.bytes,
            file.created,
            self._kept_s,
            most_bytes,
            msgspec.json.encode(file),
        ]
        keys, number = self._keys(file), [] if claim is None else [claim.number]
        fence = [] if claim is None else [self._fence(claim.job_id)]
        kept: int = await self._add(keys=[*keys, *fence], args=[*args, content, *number])
        self._room.wrote(len(content))
        return kept

    async def file(self, file_id: str) -> StoredFile | None:
        """Returns what is known of a file; None when there is no such file."""
        if ":" in file_id:
            return None
        async with _reached():
            found: Any = await self._redis.hget(self._files + file_id, "about")  # type: ignore[misc]
        return msgspec.json.decode(found, type=StoredFile) if found else None

    async def content(self, file_id: str) -> bytes:
        """Returns a file's bytes; none for no such file."""
        async with _reached():
            found: Any = await self._redis.hget(self._files + file_id, "content")  # type: ignore[misc]
        return found or b""

    async def files(self, asked: ListPage) -> tuple[list[StoredFile], bool]:
        """Returns one page, the youngest first, and whether there are more."""
        ids, more = await self._page(self._files, asked)
        async with _reached():
            pipe = self._redis.pipeline(transaction=False)
            for file_id in ids:
                pipe.hget(self._files + file_id, "about")
            found: list[Any] = await pipe.execute() if ids else []
        return [msgspec.json.decode(about, type=StoredFile) for about in found if about], more

    async def drop_file(self, file: StoredFile) -> None:
        """Forgets a file and its bytes."""
        async with _reached():
            await self._drop(keys=self._keys(file), args=[file.id, file.bytes])

    def _keys(self, file: StoredFile) -> list[str]:
        kept = f"{self._files}list:kept:{file.tenant}"
        return [self._files + file.id, *_lists(self._files, file.tenant), kept, f"{self._files}bytes:{file.tenant}"]

    # ---- jobs --------------------------------------------------------------------------------------

    async def put(self, job: BatchJob, is_open: bool) -> None:
        """Keeps a new job; an open one is found by ``open_jobs``. Raises StorageFull."""
        async with _reached():
            if not await self._room.has(len(job.key) + JOB_BYTES, UPLOADS):
                raise StorageFull("the store has no room for another job: delete files, or raise maxmemory")
            pipe = self._redis.pipeline(transaction=True)
            pipe.set(self._jobs + job.id, msgspec.json.encode(job), ex=self._kept_s)
            for listed in _lists(self._jobs, job.tenant):
                pipe.zremrangebyscore(listed, "-inf", job.created - self._kept_s)
                pipe.zadd(listed, {job.id: job.created})
                pipe.expire(listed, self._kept_s)
            (pipe.sadd if is_open else pipe.srem)(self._open, job.id)
            pipe.expire(self._open, self._kept_s)
            await pipe.execute()

    async def job(self, job_id: str) -> BatchJob | None:
        """Returns a job; None for no such job."""
        if ":" in job_id:
            return None
        async with _reached():
            found = await self._redis.get(self._jobs + job_id)
        return (await self._counted([msgspec.json.decode(found, type=BatchJob)]))[0] if found else None

    async def jobs(self, asked: ListPage) -> tuple[list[BatchJob], bool]:
        """Returns one page, the youngest first, and whether there are more."""
        ids, more = await self._page(self._jobs, asked)
        async with _reached():
            found: list[Any] = await self._redis.mget([self._jobs + job_id for job_id in ids]) if ids else []
        return await self._counted([msgspec.json.decode(job, type=BatchJob) for job in found if job]), more

    async def _counted(self, jobs: list[BatchJob]) -> list[BatchJob]:
        """With what is answered by now; an ended one says so itself."""
        running = [job for job in jobs if not job.ended]
        async with _reached():
            pipe = self._redis.pipeline(transaction=False)
            for job in running:
                pipe.hlen(f"{self._jobs}{job.id}:output")
                pipe.hlen(f"{self._jobs}{job.id}:errors")
            counts = iter(await pipe.execute() if running else [])
        now = {job.id: {"completed": next(counts), "failed": next(counts)} for job in running}
        return [msgspec.structs.replace(job, **now.get(job.id, {})) for job in jobs]

    async def forget_job(self, job_id: str) -> None:
        """Forgets a job whose time is over, so that nobody looks for it any more."""
        async with _reached():
            await self._redis.srem(self._open, job_id)  # type: ignore[misc]

    async def open_jobs(self) -> list[str]:
        """Ids of jobs that still have lines to answer, or to be ended."""
        async with _reached():
            found: Any = await self._redis.smembers(self._open)  # type: ignore[misc]
        return sorted(member.decode() for member in found)

    async def ask_cancel(self, job_id: str) -> None:
        """Says to whoever has the job that it is to end."""
        async with _reached():
            await self._redis.set(f"{self._jobs}{job_id}:cancel", b"1", ex=self._kept_s)

    async def cancel_asked(self, job_id: str) -> bool:
        """Returns whether somebody asked for the job to end."""
        async with _reached():
            return bool(await self._redis.exists(f"{self._jobs}{job_id}:cancel"))

    # ---- answers -----------------------------------------------------------------------------------

    async def claim(self, job_id: str, owner: str, lease_s: float) -> JobClaim | None:
        """Returns the right to an open job for ``lease_s`` seconds; None while another router has it."""
        args: list[str | bytes | float] = [job_id, owner, int(lease_s * 1000), self._kept_s]
        async with _reached():
            number: int = await self._claim(keys=[self._owner(job_id), self._fence(job_id), self._open], args=args)
        return JobClaim(job_id, owner, number) if number else None

    async def renew(self, claim: JobClaim, lease_s: float) -> bool:
        """Keeps the claim for ``lease_s`` more seconds; False when a later one was given or the job is closed."""
        keys = [self._fence(claim.job_id), self._owner(claim.job_id), self._open]
        args: list[str | bytes | float] = [
            claim.number,
            claim.job_id,
            claim.owner,
            int(lease_s * 1000),
            self._kept_s,
        ]
        async with _reached():
            return bool(await self._renew(keys=keys, args=args))

    async def release(self, claim: JobClaim) -> None:
        """Lets another router claim the job at once, unless one already did."""
        keys = [self._fence(claim.job_id), self._owner(claim.job_id)]
        async with _reached():
            await self._release(keys=keys, args=[claim.number])

    async def update(self, claim: JobClaim, job: BatchJob) -> None:
        """Keeps an open job's state. Raises ClaimLost."""
        keys = [self._fence(job.id), self._jobs + job.id]
        await self._fenced(self._update, claim, keys, [msgspec.json.encode(job), self._kept_s])

    async def close(self, claim: JobClaim, job: BatchJob) -> None:
        """Keeps an ended job's state and drops its answers, which are in files now. Raises ClaimLost."""
        keys = [self._fence(job.id), self._jobs + job.id, self._open, *self._answers(job.id)]
        await self._fenced(self._close, claim, keys, [msgspec.json.encode(job), self._kept_s, job.id])

    async def answer(self, claim: JobClaim, line: int, answer: bytes, good: bool) -> None:
        """Keeps a line's answer, once. Raises ClaimLost."""
        keys = [self._fence(claim.job_id), self._answers(claim.job_id)[not good]]
        await self._fenced(self._answer, claim, keys, [line, answer, self._kept_s])
        self._room.wrote(len(answer))

    async def _fenced(self, script: Any, claim: JobClaim, keys: list[str], args: list[str | bytes | float]) -> None:
        async with _reached():
            if not await script(keys=keys, args=[claim.number, *args]):
                raise JobClaimLost(claim.job_id)

    def _owner(self, job_id: str) -> str:
        return f"{self._jobs}{job_id}:owner"

    def _fence(self, job_id: str) -> str:
        return f"{self._jobs}{job_id}:fence"

    def _answers(self, job_id: str) -> tuple[str, str]:
        """Returns the keys of the good answers and of the bad ones."""
        return f"{self._jobs}{job_id}:output", f"{self._jobs}{job_id}:errors"

    async def answers(self, job_id: str, good: bool) -> Mapping[int, bytes]:
        """Returns the answers so far, by line."""
        async with _reached():
            found: Any = await self._redis.hgetall(self._answers(job_id)[not good])  # type: ignore[misc]
        return {int(line): answer for line, answer in sorted(found.items(), key=lambda pair: int(pair[0]))}

    # ---- lists -------------------------------------------------------------------------------------

    async def _page(self, prefix: str, asked: ListPage) -> tuple[list[str], bool]:
        """Ids, and whether there are more. Raises InvalidRequest where ``after`` is in no list."""
        listed, first = _listed(prefix, asked.tenant), 0
        async with _reached():
            if asked.after:
                rank: Any = await self._redis.zrevrank(listed, asked.after)
                if rank is None:
                    raise InvalidRequest(f"after is {asked.after!r}, which is not in the list", "after")
                first = rank + 1
            found: Any = await self._redis.zrevrange(listed, first, first + asked.limit)
        return [member.decode() for member in found[: asked.limit]], len(found) > asked.limit


def _lists(prefix: str, tenant: str) -> tuple[str, str]:
    """Where it is to be found: among all, and among its tenant's."""
    return _listed(prefix, None), _listed(prefix, tenant)


def _listed(prefix: str, tenant: str | None) -> str:
    return prefix + ("list:all" if tenant is None else f"list:of:{tenant}")


@asynccontextmanager
async def _reached() -> AsyncIterator[None]:
    try:
        yield
    except OutOfMemoryError:
        raise StorageFull("the cluster's store is full: delete files, or give Redis more memory") from None
    except (TimeoutError, RedisError, OSError) as error:
        raise Unavailable(f"the store of batch jobs can't be reached: {error}", retry_after_s=1.0) from None
