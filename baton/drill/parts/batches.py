"""Simulated clients of the batch API: each uploads a file and expects each line answered exactly once, by any
router.

A job whose data a fault deleted from the store (see LOSING) may be missing. Knows nothing of how routers process
batch jobs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from baton.cluster.batch_nouns import BatchJob, StoredFile
from baton.cluster.batch_store import BatchStore
from baton.cluster.membership import connect
from baton.drill.language import oracle
from baton.drill.machines.network import Network
from baton.drill.parts.calls import RouterCalls
from baton.drill.parts.engine import MODEL_ID
from baton.drill.parts.http import HttpAsk
from baton.drill.parts.life import EPOCH_S, NAMESPACE
from baton.drill.redis.server import URL, connections
from baton.drill.scenario import Batch, Fault
from baton.protos.errors import BatonError
from baton.protos.json import Json
from baton.protos.nouns import Sampling

LOSING = ("redis_flushed", "redis_restarts", "redis_forgets")  # faults that lose what was written
AT_ONCE = 8  # lines of a job that a router answers at once
LOOK_S = 1.0  # seconds between two looks at a job
COMPLETIONS = "/v1/completions"
WHO = "batches"
T = TypeVar("T")


class BatchClients:
    """Opens the batch jobs of a simulated run and checks their results; each violation is passed to
    ``violated``.
    """

    def __init__(
        self,
        network: Network,
        faults: tuple[Fault, ...],
        violated: Callable[[str], None],
        tell: Callable[[str, str], None],
        sight: oracle.Sight = oracle.Sight(),
        calls: RouterCalls | None = None,
    ) -> None:
        self._calls = calls
        # Lines that are answered after a cancel, at most: under faults two lanes'.
        self._most_more = (AT_ONCE + 1) * (2 if faults else 1)
        # Jobs that a router said to be cancelling, with the lines that may have answers at most.
        self._cancelled: dict[int, int] = {}
        self._sight = sight
        self._violated, self._tell = violated, tell
        self._clock = asyncio.get_running_loop().time
        self._redis = connect(URL, connections(network, WHO))
        self._store = BatchStore(self._redis, NAMESPACE, clock=self._clock)
        self._may_vanish = any(fault.kind in LOSING for fault in faults)
        self._may_fail = any(fault.kind == "no_memory" for fault in faults)  # a line, with an error of its own

    async def bring(self, number: int, batch: Batch, began: float) -> None:
        """Waits until ``batch.at`` seconds after ``began`` (loop time), then uploads the input file of job
        ``number`` and opens the job.
        """
        await asyncio.sleep(began + batch.at - self._clock())
        content = b"\n".join(json.dumps(_line(i, p, batch)).encode() for i, p in enumerate(batch.prompts))
        now = int(EPOCH_S + self._clock())
        file = StoredFile(f"file-{number}", "", "in.jsonl", "batch", len(content), now)
        job = BatchJob(_job_id(number), "", COMPLETIONS, file.id, "24h", len(batch.prompts), now)
        await self._patiently(lambda: self._store.add_file(file, content))
        await self._patiently(lambda: self._store.put(job, is_open=True))
        self._tell(WHO, f"job {number} of {len(batch.prompts)} lines is open")
        opened = self._clock()
        for after in batch.cancels:
            await asyncio.sleep(max(0.0, opened + after - self._clock()))
            await self._cancel(number, batch)

    async def _cancel(self, number: int, batch: Batch) -> None:
        """Asks a router to cancel job ``number``."""
        assert self._calls is not None
        call = await self._calls.asked(batch.router, HttpAsk(f"/v1/batches/{_job_id(number)}/cancel"))
        said = json.loads(call.body).get("status") if call is not None and call.over else "nothing"
        self._tell(WHO, f"job {number} is to be cancelled: a router says {said}")
        if said == "cancelling":
            job = await self._patiently(lambda: self._store.job(_job_id(number)))
            most = len(batch.prompts) if job is None else job.completed + job.failed + self._most_more
            self._cancelled.setdefault(number, most)

    async def judge(self, number: int, batch: Batch, seconds: float) -> None:
        """Waits at most ``seconds`` for job ``number`` to end, and reports a violation if it hasn't, is missing or
        has wrong output.

        A job that has not ended or is missing is accepted in runs with a fault that deletes Redis data.
        """
        until = self._clock() + seconds
        while True:
            job = await self._patiently(lambda: self._store.job(_job_id(number)))
            if job is None or job.ended or self._clock() > until:
                break
            await asyncio.sleep(LOOK_S)
        if job is None or not job.ended:
            if not self._may_vanish:
                self._violated(f"batch job {number} " + ("is gone" if job is None else "has not ended"))
            return
        if await self._lost_its_input(number, job):
            return
        content = await self._patiently(lambda: self._store.content(job.output_file)) if job.output_file else b""
        self._hold(number, batch, job, content)

    async def _lost_its_input(self, number: int, job: BatchJob) -> bool:
        """Returns whether job ``number`` failed, with the error that says so, because its input file was lost."""
        if not self._may_vanish or job.status != "failed":
            return False
        content = await self._patiently(lambda: self._store.content(job.input_file))
        if content or [error["code"] for error in job.errors if isinstance(error, dict)] != ["input_gone"]:
            return False
        self._tell(WHO, f"job {number}: failed, because the store lost its input file")
        return True

    async def at_rest(self, number: int) -> None:
        """Reports a violation if answers of job ``number`` are kept although it has ended, as when a router whose
        claim was over wrote on.
        """
        job = await self._patiently(lambda: self._store.job(_job_id(number)))
        if job is None or not job.ended or self._may_vanish:
            return
        for good in (True, False):
            if kept := await self._patiently(lambda good=good: self._store.answers(job.id, good)):  # type: ignore[misc]
                self._violated(f"batch job {number} has ended, and {len(kept)} of its answers are kept")

    async def close(self) -> None:
        """Closes the Redis connection that the jobs were written and read through."""
        await self._redis.aclose()

    def _hold(self, number: int, batch: Batch, job: BatchJob, content: bytes) -> None:
        answers = [json.loads(line) for line in content.splitlines()]
        names = [answer["custom_id"] for answer in answers]
        self._tell(WHO, f"job {number}: {job.status}, {len(names)} of {job.total} lines")
        lost = self._may_vanish and not content
        excused = job.failed if self._may_fail else 0
        if number in self._cancelled or (batch.cancels and self._may_vanish):
            self._hold_cancelled(number, job, names)
            self._right(number, batch, answers)
            return
        if (
            job.status != "completed"
            or (len(set(names)) + excused != job.total and not lost)
            or len(names) != len(set(names))
        ):
            self._violated(f"batch job {number} is {job.status} with {len(names)} answers to {job.total} lines")
        if not lost and (job.completed, job.failed) != (job.total - excused, excused):
            self._violated(f"batch job {number} counts {job.completed} + {job.failed} of {job.total} lines")
        self._right(number, batch, answers)

    def _hold_cancelled(self, number: int, job: BatchJob, names: Sequence[str]) -> None:
        """Checks a job that was to be cancelled: it ends so, or was complete before that was heard."""
        whole = job.status == "completed" and len(names) + job.failed == job.total
        if job.status != "cancelled" and not whole:
            self._violated(f"batch job {number}, which was cancelled, is {job.status} with {len(names)} answers")
        most = job.total if self._may_vanish else self._cancelled.get(number, job.total)  # the cancel may be lost
        if job.completed + job.failed > most:
            self._violated(f"batch job {number} goes on after its cancel: {job.completed} lines instead of {most}")
        if len(names) != len(set(names)) or (job.completed != len(names) and not self._may_vanish):
            self._violated(
                f"batch job {number}, which was cancelled, counts {job.completed} of {len(names)} answers"
            )

    def _right(self, number: int, batch: Batch, answers: Sequence[Json]) -> None:
        """Checks that answers are the oracle's."""
        for answer in answers:
            prompt = batch.prompts[int(answer["custom_id"])]
            asked = Sampling(temperature=0.0, max_tokens=batch.max_tokens, ignore_eos=True)
            want = oracle.answer(prompt, asked, 0, sight=self._sight)
            if answer["response"]["body"]["choices"][0]["token_ids"] != want[0]:
                self._violated(f"batch job {number}: line {answer['custom_id']} is not the oracle's")

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except BatonError:
                await asyncio.sleep(LOOK_S)


def _line(number: int, prompt: tuple[int, ...], batch: Batch) -> dict[str, object]:
    body = {
        "model": MODEL_ID, "prompt": list(prompt), "max_tokens": batch.max_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    return {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}


def _job_id(number: int) -> str:
    return f"batch_{number}"
