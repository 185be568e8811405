"""Files and batch jobs, kept in Redis so that every router serves them and any router can go on with a job.

Knows nothing of HTTP or of what a line asks for. Unlike the rest of this folder it is no hint: a job's state
lives here alone, so a Redis that can't be reached is an error the caller hears of.

    job: open ──claim (a lease, renewed)──> lines answered one by one ──> closed
                 └ the router dies: the lease runs out, another one claims and answers what is left

Every claim has a number, one higher than the claim before. What a claim's holder writes is written only while no
later claim was given (one script checks and writes), so a holder that paused can't undo what its successor did.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import msgspec
from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import OutOfMemoryError, RedisError

from baton.cluster.batch_nouns import BatchJob, JobClaim, JobClaimLost, ListPage, StoredFile
from baton.cluster.batch_scripts import ADD, ANSWER, CLAIM, CLOSE, DROP, RELEASE, RENEW, UPDATE
from baton.cluster.store.room import ANSWERS, COPIES, UPLOADS, RedisMemory
from baton.protos.errors import InvalidRequest, StorageFull, Unavailable

KEPT_S = 7 * 86_400  # seconds that files and jobs are kept by default: a week
READ_AT_ONCE = 256  # answers that are read of a job in one call, which takes some milliseconds to parse
JOB_BYTES = 4096  # of a job's state, about


class BatchStore:
    """Keeps batch files and jobs in Redis. Every method raises Unavailable if Redis can't be reached.

    Keys are under ``{namespace}:file:`` and ``{namespace}:batch:``; ids have no colon. Entries are kept for
    ``kept_s`` seconds.
    """

    def __init__(
        self, redis: Redis, namespace: str, kept_s: int = KEPT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis, self._kept_s = redis, kept_s
        self._files, self._jobs = f"{{{namespace}}}:file:", f"{{{namespace}}}:batch:"
        self._open = self._jobs + "list:open"
        self._claim, self._renew = redis.register_script(CLAIM), redis.register_script(RENEW)
        self._release, self._answer = redis.register_script(RELEASE), redis.register_script(ANSWER)
        self._update, self._close = redis.register_script(UPDATE), redis.register_script(CLOSE)
        self._add, self._drop = redis.register_script(ADD), redis.register_script(DROP)
        self._room = RedisMemory(redis, clock)

    async def has_room(self, size: int, share: float = ANSWERS) -> bool:
        """Returns whether ``size`` more bytes fit into the store's ``share`` of Redis's memory."""
        async with _reached():
            return await self._room.has(size, share)

    # ---- files -------------------------------------------------------------------------------------

    async def add_file(self, file: StoredFile, content: bytes, most_bytes: int = -1) -> int | None:
        """Stores a file and returns None; if the tenant's files would exceed ``most_bytes`` (-1: no limit), returns
        the bytes that they have.

        Raises StorageFull if the store has no room.
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

    async def add_output(self, claim: JobClaim, file: StoredFile, content: bytes | bytearray) -> None:
        """Stores a file of a job's answers; storing it again changes nothing. Raises JobClaimLost."""
        async with _reached():
            if await self._write(file, content, -1, claim) == -2:
                raise JobClaimLost(claim.job_id)

    async def _write(
        self, file: StoredFile, content: bytes | bytearray, most_bytes: int, claim: JobClaim | None = None
    ) -> int:
        args: list[str | bytes | memoryview | float] = [
            file.id,
            file.bytes,
            file.created,
            self._kept_s,
            most_bytes,
            msgspec.json.encode(file),
        ]
        keys, number = self._keys(file), [] if claim is None else [claim.number]
        fence = [] if claim is None else [self._fence(claim.job_id)]
        kept: int = await self._add(keys=[*keys, *fence], args=[*args, memoryview(content), *number])
        self._room.wrote(len(content))
        return kept

    async def file(self, file_id: str) -> StoredFile | None:
        """Returns the description of a file; None if there is none."""
        if ":" in file_id:
            return None
        async with _reached():
            found = await cast(Awaitable[bytes | None], self._redis.hget(self._files + file_id, "about"))
        return msgspec.json.decode(found, type=StoredFile) if found else None

    async def content(self, file_id: str) -> bytes:
        """Returns a file's bytes; b"" if there is no such file."""
        async with _reached():
            found = await cast(Awaitable[bytes | None], self._redis.hget(self._files + file_id, "content"))
        return found or b""

    async def files(self, asked: ListPage) -> tuple[list[StoredFile], bool]:
        """Returns one page of files and whether there are more.

        Raises InvalidRequest if ``asked.after`` is unknown.
        """
        first, more, found = await self._first(self._files, asked), True, list[StoredFile]()
        while more and len(found) < asked.limit + bool(asked.purpose):
            ids, more = await self._page(self._files, asked, first)
            first += len(ids)
            found += [file for file in await self._described(ids) if asked.purpose in ("", file.purpose)]
        return found[: asked.limit], more or len(found) > asked.limit

    async def _described(self, ids: list[str]) -> list[StoredFile]:
        async with _reached():
            pipe = self._redis.pipeline(transaction=False)
            for file_id in ids:
                pipe.hget(self._files + file_id, "about")
            found: list[bytes | None] = await pipe.execute() if ids else []
        return [msgspec.json.decode(about, type=StoredFile) for about in found if about]

    async def drop_file(self, file: StoredFile) -> None:
        """Deletes a file and its content."""
        async with _reached():
            await self._drop(keys=self._keys(file), args=[file.id, file.bytes])

    def _keys(self, file: StoredFile) -> list[str]:
        kept = f"{self._files}list:kept:{file.tenant}"
        return [self._files + file.id, *_lists(self._files, file.tenant), kept, f"{self._files}bytes:{file.tenant}"]

    # ---- jobs --------------------------------------------------------------------------------------

    async def put(self, job: BatchJob, is_open: bool) -> None:
        """Stores a new job; with ``is_open`` routers find it by ``open_jobs``. Raises StorageFull."""
        told = msgspec.json.encode(job)
        async with _reached():
            if not await self._room.has(len(told) + JOB_BYTES, UPLOADS):
                raise StorageFull("the store has no room for another job: delete files, or raise maxmemory")
            pipe = self._redis.pipeline(transaction=True)
            pipe.set(self._jobs + job.id, told, ex=self._kept_s)
            for listed in _lists(self._jobs, job.tenant):
                pipe.zremrangebyscore(listed, "-inf", job.created - self._kept_s)
                pipe.zadd(listed, {job.id: job.created})
                pipe.expire(listed, self._kept_s)
            (pipe.sadd if is_open else pipe.srem)(self._open, job.id)
            pipe.expire(self._open, self._kept_s)
            await pipe.execute()
        self._room.wrote(len(told))

    async def job(self, job_id: str) -> BatchJob | None:
        """Returns a job with its current counts of answered lines, "cancelling" if it is to be cancelled; None if
        there is none.
        """
        if ":" in job_id:
            return None
        async with _reached():
            found = await self._redis.get(self._jobs + job_id)
        return (await self._counted([msgspec.json.decode(found, type=BatchJob)]))[0] if found else None

    async def jobs(self, asked: ListPage) -> tuple[list[BatchJob], bool]:
        """Returns one page of jobs and whether there are more.

        Raises InvalidRequest if ``asked.after`` is unknown.
        """
        ids, more = await self._page(self._jobs, asked, await self._first(self._jobs, asked))
        async with _reached():
            found = await self._redis.mget([self._jobs + job_id for job_id in ids]) if ids else []
        return await self._counted([msgspec.json.decode(job, type=BatchJob) for job in found if job]), more

    async def _counted(self, jobs: list[BatchJob]) -> list[BatchJob]:
        """Returns the jobs with their current numbers of answers and errors, and whether they are to be cancelled;
        an ended job has its own.
        """
        running = [job for job in jobs if not job.ended]
        async with _reached():
            pipe = self._redis.pipeline(transaction=False)
            for job in running:
                pipe.hlen(f"{self._jobs}{job.id}:output")
                pipe.hlen(f"{self._jobs}{job.id}:errors")
                pipe.get(self._cancel(job.id))
            found = iter(await pipe.execute() if running else [])
        now = {job.id: _present(job, next(found), next(found), next(found)) for job in running}
        return [now.get(job.id, job) for job in jobs]

    async def forget_job(self, job_id: str) -> None:
        """Removes a job that has expired from the open jobs."""
        async with _reached():
            await self._redis.srem(self._open, job_id)  # type: ignore[misc]

    async def open_jobs(self) -> list[str]:
        """Returns the ids of jobs that aren't ended yet, sorted."""
        async with _reached():
            found = await cast(Awaitable[set[bytes]], self._redis.smembers(self._open))
        return sorted(member.decode() for member in found)

    async def request_cancel(self, job_id: str, at: int) -> None:
        """Asks whichever router works on the job to end it; ``at`` is now, in Unix seconds. The first call's
        counts.
        """
        async with _reached():
            await self._redis.set(self._cancel(job_id), at, ex=self._kept_s, nx=True)

    async def cancel_requested(self, job_id: str) -> int:
        """Returns when ``request_cancel`` was first called for the job, in Unix seconds; 0 if it wasn't."""
        async with _reached():
            return int(await self._redis.get(self._cancel(job_id)) or 0)

    def _cancel(self, job_id: str) -> str:
        return f"{self._jobs}{job_id}:cancel"

    # ---- answers -----------------------------------------------------------------------------------

    async def claim(self, job_id: str, owner: str, lease_s: float) -> JobClaim | None:
        """Claims an open job for ``lease_s`` seconds; returns None while another router holds it."""
        args: list[str | bytes | float] = [job_id, owner, int(lease_s * 1000), self._kept_s]
        async with _reached():
            number: int = await self._claim(keys=[self._owner(job_id), self._fence(job_id), self._open], args=args)
        return JobClaim(job_id, owner, number) if number else None

    async def renew(self, claim: JobClaim, lease_s: float) -> bool:
        """Extends the claim to ``lease_s`` seconds from now; returns False if a later claim was given or the job is
        closed.
        """
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
        """Ends the claim, so that another router can claim the job at once."""
        keys = [self._fence(claim.job_id), self._owner(claim.job_id)]
        async with _reached():
            await self._release(keys=keys, args=[claim.number])

    async def update(self, claim: JobClaim, job: BatchJob) -> None:
        """Stores an open job's state. Raises JobClaimLost."""
        keys = [self._fence(job.id), self._jobs + job.id]
        await self._fenced(self._update, claim, keys, [msgspec.json.encode(job), self._kept_s])

    async def close(self, claim: JobClaim, job: BatchJob) -> None:
        """Stores an ended job's state and deletes its single answers, which are in files by then.

        Raises JobClaimLost.
        """
        keys = [self._fence(job.id), self._jobs + job.id, self._open, *self._answers(job.id)]
        await self._fenced(self._close, claim, keys, [msgspec.json.encode(job), self._kept_s, job.id])

    async def answer(self, claim: JobClaim, line: int, answer: bytes, good: bool) -> None:
        """Stores the answer of a line, unless the line has one; ``good`` tells output from errors.

        Raises JobClaimLost.
        """
        keys = [self._fence(claim.job_id), self._answers(claim.job_id)[not good]]
        await self._fenced(self._answer, claim, keys, [line, answer, self._kept_s])
        self._room.wrote(len(answer))

    async def _fenced(
        self, script: AsyncScript, claim: JobClaim, keys: list[str], args: list[str | bytes | float]
    ) -> None:
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

    async def answers(self, job_id: str, good: bool) -> dict[int, bytes]:
        """Returns the answers so far, by line number; ``good`` tells output from errors.

        They are read some at a time, because a whole job's would hold up everybody while they are parsed.
        """
        found, at = dict[int, bytes](), 0
        async with _reached():
            while True:
                reading = self._redis.hscan(self._answers(job_id)[not good], at, count=READ_AT_ONCE)
                at, some = await cast(Awaitable[tuple[int, dict[bytes, bytes]]], reading)
                found.update((int(line), answer) for line, answer in some.items())
                if not at:
                    return dict(sorted(found.items()))
                await asyncio.sleep(0)

    # ---- lists -------------------------------------------------------------------------------------

    async def _first(self, prefix: str, asked: ListPage) -> int:
        """Returns the rank of the first entry after ``after``. Raises InvalidRequest if that is in no list."""
        if not asked.after:
            return 0
        rank_of = self._redis.zrank if asked.oldest_first else self._redis.zrevrank
        async with _reached():
            rank = cast(int | None, await rank_of(_listed(prefix, asked.tenant), asked.after))
        if rank is None:
            raise InvalidRequest(f"after is {asked.after!r}, which is not in the list", "after")
        return rank + 1

    async def _page(self, prefix: str, asked: ListPage, first: int) -> tuple[list[str], bool]:
        """Returns ids from rank ``first`` on, and whether there are more."""
        listed, newest_first = _listed(prefix, asked.tenant), not asked.oldest_first
        async with _reached():
            reading = self._redis.zrange(listed, first, first + asked.limit, desc=newest_first)
            found = cast(list[bytes], await reading)
        return [member.decode() for member in found[: asked.limit]], len(found) > asked.limit


def _lists(prefix: str, tenant: str) -> tuple[str, str]:
    """Returns the keys of the lists that name a tenant's job: of all jobs, and of the tenant's."""
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


def _present(job: BatchJob, completed: int, failed: int, cancelling: bytes | None) -> BatchJob:
    """Returns a job that hasn't ended as it is now."""
    found = msgspec.structs.replace(job, completed=completed, failed=failed)
    return msgspec.structs.replace(found, status="cancelling", cancelling=int(cancelling)) if cancelling else found
