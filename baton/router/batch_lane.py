"""The cost-first lane: answers batch jobs' requests when nobody waits, and goes on where another router stopped.

Knows nothing of HTTP. One task finds jobs and claims them by a lease; each line is one low-priority request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import orjson

from baton.cluster.batch_store import BatchStore, Job, StoredFile
from baton.protos.errors import BatonError, QuotaExceeded, Unauthenticated
from baton.protos.rpc import heed_cancel, settled
from baton.router.batch_lines import Line, answer_line, read_lines
from baton.router.caller import CALLER, Caller
from baton.router.generation import Frontend
from baton.router.keys import Key

LEASE_S = 10.0
LOOK_EVERY_S = 0.5
ROOM_EVERY_S = 0.05
AT_ONCE = 8
TRIES = 5
MOST_PAUSE_S = 10.0
NO_INPUT = {"code": "input_gone", "line": None, "message": "the input file is gone", "param": "input_file_id"}
LOWEST_PRIORITY = 1000  # behind everybody who asks for an answer now
log = logging.getLogger(__name__)


class BatchLane:
    """``queued``: requests that wait for a place; while there is one, the lane starts none of its own."""

    def __init__(self, frontend: Frontend, store: BatchStore, owner: str, queued: Callable[[], int]) -> None:
        self._frontend, self._store, self._owner, self._queued = frontend, store, owner, queued

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work, while the block runs; what is unfinished then is somebody else's at once."""
        task = asyncio.create_task(self._run(), name="batch lane")
        try:
            yield
        finally:
            while not task.done():  # a cancellation that meets a failing line is lost in the line's failure
                task.cancel()
                await asyncio.wait([task], timeout=ROOM_EVERY_S)

    async def _run(self) -> None:
        while True:
            try:
                for job_id in await self._store.open_jobs():
                    await self._try(job_id)
            except BatonError as error:
                log.warning("batch lane: %s", error.message)
            heed_cancel()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _try(self, job_id: str) -> None:
        """``work``, so that a job that fails holds up none of those behind it."""
        try:
            await self.work(job_id)
        except BatonError as error:
            log.warning("batch lane: %s: %s", job_id, error.message)
        except Exception:
            log.exception("the batch lane failed on %s", job_id)
        heed_cancel()

    async def work(self, job_id: str) -> None:
        """Answer a job's lines, unless another router has it."""
        if not await self._store.claim(job_id, self._owner, LEASE_S):
            return
        keeping = asyncio.create_task(self._keep(job_id))
        try:
            job = await self._store.job(job_id)
            if job is None:
                await self._store.forget_job(job_id)
            else:
                await self._answer(job)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self._store.release(job_id, self._owner)

    async def _keep(self, job_id: str) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            await self._store.claim(job_id, self._owner, LEASE_S)
            heed_cancel()

    async def _answer(self, job: Job) -> None:
        lines, _ = read_lines(await self._store.content(job.input_file), job.endpoint)
        if len(lines) != job.total:
            await self._close(job, NO_INPUT)
            return
        if not job.started:
            job = msgspec.structs.replace(job, status="in_progress", started=int(self._frontend.wall_clock()))
            await self._store.put(job, is_open=True)
        answered = {*await self._store.answers(job.id, True), *await self._store.answers(job.id, False)}
        places = asyncio.Semaphore(AT_ONCE)
        asked: list[asyncio.Task[None]] = []
        refused: dict[str, Any] | None = None
        async with asyncio.TaskGroup() as scope:
            for number, line in enumerate(lines):
                if number in answered:
                    continue
                await self._room(places)
                key, refused = self._key_now(job)
                if refused or await self._store.cancel_asked(job.id):
                    places.release()
                    break
                asked.append(scope.create_task(self._line(job, key, number, line, places)))
            await settled(asked)
        await self._close(job, refused)

    def _key_now(self, job: Job) -> tuple[Key | None, dict[str, Any] | None]:
        """Its owner's key with the rates of now; or why there is to be no further line."""
        try:
            return self._frontend.gate.renewed(msgspec.json.decode(job.key, type=Key) if job.key else None), None
        except Unauthenticated as error:
            return None, {"code": error.label, "line": None, "message": error.message, "param": None}

    async def _room(self, places: asyncio.Semaphore) -> None:
        """Wait until we may start another one."""
        await places.acquire()
        while self._queued() or not self._frontend.serving.ready():  # noqa: ASYNC110 (room has many causes)
            await asyncio.sleep(ROOM_EVERY_S)

    async def _line(self, job: Job, key: Key | None, number: int, line: Line, places: asyncio.Semaphore) -> None:
        request_id = self._frontend.new_id()
        CALLER.set(Caller(request_id, f"{job.id}:{line.custom_id}"[:128], key))
        urgent = msgspec.structs.replace(line, body=line.body | {"priority": LOWEST_PRIORITY})
        try:
            answer, good = await self._answered(job, urgent, request_id)
            await self._store.answer(job.id, number, orjson.dumps(answer), good)
        finally:
            places.release()

    async def _answered(self, job: Job, line: Line, request_id: str) -> tuple[dict[str, object], bool]:
        """A line's answer. A rate that is used up is waited for; what else may pass is tried some times."""
        failed: BatonError = BatonError("it was not tried")
        attempt = 0
        while attempt < TRIES:
            try:
                return await answer_line(self._frontend, line, request_id)
            except QuotaExceeded as error:
                failed, pause = error, min(MOST_PAUSE_S, max(error.retry_after_s, ROOM_EVERY_S))
                if await self._store.cancel_asked(job.id):
                    break
            except BatonError as error:
                failed, pause = error, min(2.0**attempt, max(error.retry_after_s, ROOM_EVERY_S))
                attempt += 1
            except Exception as error:  # a line that we stumble over fails alone
                log.exception("a line of %s failed in the router", job.id)
                failed = BatonError(f"the router failed on this line: {error}")
                break
            await asyncio.sleep(pause)
        return _gave_up(line, request_id, failed), False

    async def _close(self, job: Job, error: dict[str, Any] | None = None) -> None:
        """Make files of the answers and end the job, as failed where there is an ``error``."""
        now, cancelled = int(self._frontend.wall_clock()), await self._store.cancel_asked(job.id)
        counted = await self._store.job(job.id) or job
        files = {"output_file": await self._file(job, True, now), "error_file": await self._file(job, False, now)}
        status = "failed" if error else "cancelled" if cancelled else "completed"
        done = msgspec.structs.replace(
            counted,
            status=status,
            ended=now,
            cancelled=now if cancelled else 0,
            errors=(error,) if error else (),
            **files,
        )
        await self._store.put(done, is_open=False)
        await self._store.drop_answers(job.id)

    async def _file(self, job: Job, good: bool, now: int) -> str:
        answers = await self._store.answers(job.id, good)
        if not answers:
            return ""
        content = b"".join(answer + b"\n" for answer in answers.values())
        file_id, name = f"file-{self._frontend.new_id()}", "output" if good else "errors"
        file = StoredFile(file_id, job.tenant, f"{job.id}_{name}.jsonl", "batch_output", len(content), now)
        await self._store.add_file(file, content)
        return file_id


def _gave_up(line: Line, request_id: str, error: BatonError) -> dict[str, object]:
    told = {"code": error.label, "message": error.message}
    return {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": None, "error": told}
