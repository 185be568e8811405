"""Background answering of batch jobs: their requests run while no interactive request for their model waits.

Knows nothing of HTTP. One task finds jobs, and a task for each claims it by a lease in the store; another router
continues a job whose router stopped. Each line is one low-priority request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import msgspec

from baton.cluster.batch_nouns import BatchJob, JobClaim, JobClaimLost, StoredFile
from baton.cluster.batch_store import BatchStore
from baton.protos.errors import BatonError, StorageFull, Unauthenticated, Unavailable
from baton.protos.json import Json
from baton.protos.rpc import heed_cancel, settled
from baton.router.access.caller import CALLER, Caller
from baton.router.access.keys import ApiKey
from baton.router.answer.service import GenerationService
from baton.router.api.batch.attempts import answered
from baton.router.api.batch.held_job import HeldJob, JobCancel
from baton.router.api.batch.lines import BatchLine, by_model, read_lines
from baton.router.api.batch.side_by_side import JobAsk, JobsUnderWay, LinePlace
from baton.router.api.large import INLINE_BYTES, offload_if
from baton.tasks.lasting import count_failure, lasting
from baton.tasks.outlasting import outlasted

LEASE_S = 10.0  # seconds that a claim holds without being renewed
LOOK_EVERY_S = 0.5  # seconds between two looks for open jobs
ROOM_EVERY_S = 0.05  # seconds between two looks whether nobody waits
RETRY_S = 0.5  # seconds before the store is asked again
LINE_BYTES = 64 << 10  # of an answer that isn't there yet
JOIN_BYTES = 1 << 20  # of an output file that are joined at once: a third of a millisecond
AT_ONCE = 8  # lines of a model that are answered at once, and such lines of a job that are under way
GRACE_S = 5.0  # seconds in which lines that are under way may end, so that they are kept, when a job is cancelled
NO_INPUT = {"code": "input_gone", "line": None, "message": "the input file is gone", "param": "input_file_id"}
LOWEST_PRIORITY = 1000  # behind everybody who asks for an answer now
log = logging.getLogger(__name__)
T = TypeVar("T")


class BatchLane:
    """Answers batch jobs while nobody else waits: ``spare`` returns whether a model has a worker that can be
    reached, and no request that waits for one; "" stands for names that aren't known.

    Each model has places of its own, so that one that is busy or gone holds up no other's lines. ``owner`` is this
    router's id in the leases.
    """

    def __init__(
        self, service: GenerationService, store: BatchStore, owner: str, spare: Callable[[str], bool]
    ) -> None:
        self._service, self._store, self._owner, self._spare = service, store, owner, spare
        self._places: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answers jobs while the block runs; at its end gives back the leases, so that another router may
        continue.
        """
        task = lasting(self._run, "batch lane")
        try:
            yield
        finally:
            await outlasted(asyncio.create_task(_ended([task])))

    async def _run(self) -> None:
        jobs = JobsUnderWay(self._try)
        try:
            await self._look(jobs)
        finally:
            await outlasted(asyncio.create_task(_ended(jobs.tasks())))

    async def _look(self, jobs: JobsUnderWay) -> None:
        said = ""
        while True:
            try:
                open_jobs = await self._store.open_jobs()
                if said:
                    log.info("batch lane: the store answers again")
                    said = ""
                await jobs.look(open_jobs, self._described)
            except BatonError as error:
                if error.label != said:
                    log.warning("batch lane: %s; jobs wait until it answers", error.message)
                said = error.label
            heed_cancel()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _described(self, job_id: str) -> JobAsk:
        """Returns whose the job is and what it takes; one that is gone has nothing."""
        job = await self._store.job(job_id)
        if job is None:
            return JobAsk("", 0, frozenset())
        file = await self._store.file(job.input_file)
        return JobAsk(job.tenant, 0 if file is None else file.bytes, frozenset(job.models))

    async def _try(self, job_id: str) -> None:
        """``work``, so that a job that fails holds up none of those behind it."""
        try:
            await self.work(job_id)
        except BatonError as error:
            log.warning("batch lane: %s: %s", job_id, error.message)
        except Exception:
            log.exception("the batch lane failed on %s", job_id)
            count_failure("batch lane")
        heed_cancel()

    async def work(self, job_id: str) -> None:
        """Answers a job's lines and closes it, unless another router holds its lease; stops if the lease is
        lost.
        """
        asked_at, tasks = asyncio.get_running_loop().time(), list[asyncio.Task[None]]()
        claiming = asyncio.create_task(self._store.claim(job_id, self._owner, LEASE_S))
        try:
            claim = await asyncio.shield(claiming)
            if claim is None:
                return
            look = partial(self._patiently, lambda: self._store.cancel_requested(job_id))
            held = HeldJob(claim, asked_at + LEASE_S, JobCancel(look))
            tasks += [asyncio.create_task(self._work(held)), asyncio.create_task(self._keep(held))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await outlasted(asyncio.create_task(self._stop(tasks, claiming)))
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def _work(self, held: HeldJob) -> None:
        job = await self._patiently(lambda: self._store.job(held.claim.job_id))
        if job is None:
            await self._store.forget_job(held.claim.job_id)
            return
        try:
            await self._answer(job, held)
        except* JobClaimLost:
            log.warning("batch lane: %s was taken over by another router", job.id)

    async def _keep(self, held: HeldJob) -> None:
        """Renews the lease until another router has the job. What fails is tried again soon."""
        loop, pause = asyncio.get_running_loop(), LEASE_S / 3
        while True:
            await asyncio.sleep(pause)
            asked_at = loop.time()
            try:
                if not await self._store.renew(held.claim, LEASE_S):
                    log.warning("batch lane: the claim on %s is gone; its work here stops", held.claim.job_id)
                    return
                held.until, pause = asked_at + LEASE_S, LEASE_S / 3
            except BatonError as error:
                log.warning("batch lane: the lease of %s: %s", held.claim.job_id, error.message)
                pause = RETRY_S
            heed_cancel()

    async def _stop(self, tasks: list[asyncio.Task[None]], claiming: asyncio.Task[JobClaim | None]) -> None:
        """Ends what works on a job and gives its lease back, also one that was being asked for."""
        await _ended(tasks)
        await asyncio.wait([claiming])
        if claiming.cancelled() or claiming.exception() or (claim := claiming.result()) is None:
            return
        try:
            await self._store.release(claim)
        except BatonError as error:  # then it runs out by itself
            log.warning("batch lane: the lease of %s: %s", claim.job_id, error.message)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Returns what ``call`` gives, as soon as the store can be reached and has room: nothing computed is given
        up.
        """
        said = ""
        while True:
            try:
                return await call()
            except (Unavailable, StorageFull) as error:
                if error.label != said:
                    log.warning("batch lane: %s", error.message)
                said = error.label
            heed_cancel()
            await asyncio.sleep(RETRY_S)

    async def _answer(self, job: BatchJob, held: HeldJob) -> None:
        content = await self._patiently(lambda: self._store.content(job.input_file))
        lines, _ = await offload_if(len(content) > INLINE_BYTES, read_lines, content, job.endpoint)
        if len(lines) != job.total:
            await self._close(job, held, NO_INPUT)
            return
        if not job.started:
            job = msgspec.structs.replace(job, status="in_progress", started=self._now())
            await self._patiently(lambda: self._store.update(held.claim, job))
        while not await self._close(job, held, await self._round(job, held, lines)):
            log.warning("batch lane: the store lost answers of %s; their lines are answered again", job.id)

    async def _round(self, job: BatchJob, held: HeldJob, lines: list[BatchLine]) -> Json | None:
        """Answers the lines that have no answer in the store, those of each model by themselves, until the job is
        cancelled; returns the error for which the rest of them isn't answered.
        """
        answered = await self._answered_before(job, held)
        CALLER.set(Caller(key=self._key_now(job)[0]))
        models = await by_model(lines, partial(self._model_of, job), answered)
        async with asyncio.TaskGroup() as scope:
            watching = scope.create_task(self._end_if_cancelled(held))
            turns = [
                scope.create_task(self._in_turn(job, held, model_id, [(n, lines[n]) for n in numbers]))
                for model_id, numbers in models.items()
            ]
            await settled(turns)
            watching.cancel()
        return held.refused

    async def _in_turn(
        self, job: BatchJob, held: HeldJob, model_id: str, lines: list[tuple[int, BatchLine]]
    ) -> None:
        """Answers lines of one model, each as soon as it may begin; returns when all that began have ended."""
        places, begun = asyncio.Semaphore(AT_ONCE), set[asyncio.Task[None]]()
        async with asyncio.TaskGroup() as scope:
            for number, line in lines:
                place = LinePlace(places, self._places[model_id])
                try:
                    await place.take()
                    cancelled = await self._room(job, held, model_id)
                    key, refused = self._key_now(job)
                    held.refused = held.refused or refused
                except BaseException:
                    place.free()
                    raise
                if held.refused or cancelled:
                    place.free()
                    break
                asked = scope.create_task(self._line(job, held, key, number, line, place, model_id))
                for under_way in (begun, held.lines):
                    under_way.add(asked)
                    asked.add_done_callback(under_way.discard)
                asked.add_done_callback(lambda _, place=place: place.free())  # type: ignore[misc]
            await settled(list(begun))

    async def _end_if_cancelled(self, held: HeldJob) -> None:
        """Ends the lines under way once the job has been to be cancelled for GRACE_S."""
        while not await held.cancel.now():
            heed_cancel()
            await asyncio.sleep(RETRY_S)
        await asyncio.sleep(GRACE_S)
        while True:  # one may have been begun meanwhile
            await _ended(list(held.lines))
            await asyncio.sleep(ROOM_EVERY_S)

    async def _answered_before(self, job: BatchJob, held: HeldJob) -> set[int]:
        """Lines that have their answers, by whichever router; ``held`` is told how much they are."""
        found: set[int] = set()
        held.stored = 0
        for good in (True, False):
            answers = await self._patiently(lambda good=good: self._store.answers(job.id, good))  # type: ignore[misc]
            held.stored += sum(map(len, answers.values()))
            found |= answers.keys()
        return found

    def _model_of(self, job: BatchJob, name: str) -> str:
        """Returns the base model of a name; also of one that no worker serves since this router began, if it was
        known when the job came.
        """
        return self._service.catalog.model_of(name) or (name if name in job.models else "")

    def _key_now(self, job: BatchJob) -> tuple[ApiKey | None, Json | None]:
        """Returns the owner's key with its current rates; or the error for which no further line is answered."""
        try:
            return self._service.quotas.gate.renewed(
                msgspec.json.decode(job.key, type=ApiKey) if job.key else None
            ), None
        except Unauthenticated as error:
            return None, {"code": error.label, "line": None, "message": error.message, "param": None}

    async def _room(self, job: BatchJob, held: HeldJob, model_id: str) -> bool:
        """Waits until we may start another line of the model; whether the job is to be cancelled instead.

        None is started while the lease is overdue (another router may have it), or while the store has no room for
        the file that the answers become.
        """
        loop = asyncio.get_running_loop()
        while not self._spare(model_id) or loop.time() > held.until:
            await held.cancel.within(ROOM_EVERY_S)
            if held.cancel.is_asked:
                return True
        while not (cancelled := await held.cancel.now()):
            if await self._patiently(lambda: self._store.has_room(held.stored + LINE_BYTES)):
                break
            if not held.waits:
                log.warning("batch lane: %s waits until the store has room for its answers", job.id)
            held.waits = True
            await held.cancel.within(RETRY_S)
        held.waits = False
        return cancelled

    async def _line(
        self,
        job: BatchJob,
        held: HeldJob,
        key: ApiKey | None,
        number: int,
        line: BatchLine,
        place: LinePlace,
        model_id: str,
    ) -> None:
        request_id = self._service.environment.new_id()
        CALLER.set(Caller(request_id, f"{job.id}:{line.custom_id}"[:128], key, can_wait=True))
        urgent = msgspec.structs.replace(line, body=line.body | {"priority": LOWEST_PRIORITY})
        told, good = await answered(self._service, urgent, request_id, partial(self._pause, held, place, model_id))
        await self._patiently(lambda: self._store.answer(held.claim, number, told, good))
        held.stored += len(told)

    async def _pause(self, held: HeldJob, place: LinePlace, model_id: str, seconds: float) -> bool:
        """Waits ``seconds`` before a line is tried again, and then until its model has a worker and nobody waits
        for one; returns whether the job is to be cancelled instead. Meanwhile other jobs have its place.
        """
        if await held.cancel.now():
            return True
        await place.pause(self._spare_after(held, model_id, seconds))
        return held.cancel.is_asked

    async def _spare_after(self, held: HeldJob, model_id: str, seconds: float) -> None:
        await held.cancel.within(seconds)
        while not held.cancel.is_asked and not self._spare(model_id):
            await held.cancel.within(ROOM_EVERY_S)

    async def _close(self, job: BatchJob, held: HeldJob, error: Json | None = None) -> bool:
        """Makes files of the answers and ends the job, as failed if there is an ``error``. Its counts are those of
        the files' lines, and its entry is written anew, also where the store lost it meanwhile.

        Returns False if the job should go on, because the store lost answers: a replica that lagged took over.
        Raises JobClaimLost.
        """
        now, claim = self._now(), held.claim
        cancelled = await self._patiently(lambda: self._store.cancel_requested(job.id))
        good = await self._patiently(lambda: self._store.answers(job.id, True))
        bad = await self._patiently(lambda: self._store.answers(job.id, False))
        completed, failed = len(good), len(bad)
        if not error and not cancelled and len(good.keys() | bad.keys()) < job.total:
            return False
        done = msgspec.structs.replace(
            job,
            status="failed" if error else "cancelled" if cancelled else "completed",
            completed=completed,
            failed=failed,
            ended=now,
            cancelled=now if cancelled else 0,
            cancelling=cancelled,
            errors=(error,) if error else (),
            output_file=await self._file(job, claim, "output", good, now),
            error_file=await self._file(job, claim, "errors", bad, now),
        )
        await self._patiently(lambda: self._store.close(claim, done))
        return True

    def _now(self) -> int:
        return int(self._service.environment.wall_clock())

    async def _file(self, job: BatchJob, claim: JobClaim, name: str, answers: dict[int, bytes], now: int) -> str:
        """Stores answers as a file and returns its id, "" if there are none. The id is the job's own: whoever makes
        the file again makes the same one. The answers are taken out of ``answers``.
        """
        if not answers:
            return ""
        content = await joined(answers)
        file_id = f"file-{job.id.removeprefix('batch_')}-{name}"
        file = StoredFile(file_id, job.tenant, f"{job.id}_{name}.jsonl", "batch_output", len(content), now)
        await self._patiently(lambda: self._store.add_output(claim, file, content))
        return file_id


async def joined(answers: dict[int, bytes]) -> bytearray:
    """Returns the answers, in order, a line each. It takes them out of ``answers`` as it goes on, so that they are
    held once, and serves others between two parts of JOIN_BYTES.
    """
    content, seen = bytearray(), 0
    for number in list(answers):
        content += answers.pop(number)
        content += b"\n"
        if len(content) - seen >= JOIN_BYTES:
            seen = len(content)
            await asyncio.sleep(0)
    return content


async def _ended(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels until all are over: a cancellation that meets a failing line is lost in the line's failure."""
    while any(not task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=ROOM_EVERY_S)
