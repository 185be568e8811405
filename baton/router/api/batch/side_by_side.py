"""Lets batch jobs of several tenants and models go on side by side in one router.

Knows nothing of lines' contents or of the store. Each tenant has one job of a model under way, so that a long job,
one whose key has used up its rate, or one whose model is busy or gone holds up no other's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import NamedTuple

MOST_JOBS = 64  # under way in a router
MOST_BYTES = 256 << 20  # of their input files, which are held while they are worked on; one job may be larger


class JobAsk(NamedTuple):
    """Describes what an open job takes: its tenant, the bytes of its input, and the models that its lines are for,
    none where that isn't known.
    """

    tenant: str
    size: int
    models: frozenset[str]

    def goes_behind(self, other: JobAsk) -> bool:
        """Returns whether the job waits while the job ``other`` is under way: a tenant's go one after the other,
        unless they are for different models.
        """
        apart = self.models and other.models and self.models.isdisjoint(other.models)
        return self.tenant == other.tenant and not apart


class LinePlace:
    """Holds a line's two places while it is answered: one of its job's, one of the router's for its model."""

    def __init__(self, of_job: asyncio.Semaphore, of_router: asyncio.Semaphore) -> None:
        self._of_job, self._of_router = of_job, of_router
        self._held: list[asyncio.Semaphore] = []

    async def take(self) -> None:
        """Waits until both places are there."""
        for place in (self._of_job, self._of_router):
            await place.acquire()
            self._held.append(place)

    async def pause(self, over: Awaitable[None]) -> None:
        """Waits until the pause is ``over``; meanwhile lines of other jobs may have the router's place."""
        self._held.remove(self._of_router)
        self._of_router.release()
        await over
        await self._of_router.acquire()
        self._held.append(self._of_router)

    def free(self) -> None:
        """Gives back what is held. Idempotent."""
        while self._held:
            self._held.pop().release()


class JobsUnderWay:
    """Keeps which jobs are worked on: one per tenant and model, MOST_JOBS and MOST_BYTES in all."""

    def __init__(self, work: Callable[[str], Coroutine[None, None, None]]) -> None:
        self._work = work
        self._serial = itertools.count(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, JobAsk] = {}
        self._begun: dict[str, int] = {}  # when it was last worked on: one that fails is behind its tenant's others

    async def look(self, open_jobs: list[str], describe: Callable[[str], Awaitable[JobAsk]]) -> None:
        """Begins those of ``open_jobs`` that may begin now; ``describe`` returns what a job takes, and is asked
        once per job.
        """
        self._tasks = {job_id: task for job_id, task in self._tasks.items() if not task.done()}
        self._known = {
            job_id: found for job_id, found in self._known.items() if job_id in {*open_jobs, *self._tasks}
        }
        self._begun = {job_id: at for job_id, at in self._begun.items() if job_id in self._known}
        for job_id in sorted(open_jobs, key=lambda job_id: self._begun.get(job_id, 0)):
            if job_id in self._tasks:
                continue
            if job_id not in self._known:
                self._known[job_id] = await describe(job_id)
            if self._may_begin(self._known[job_id]):
                self._begun[job_id] = next(self._serial)
                self._tasks[job_id] = asyncio.create_task(self._work(job_id), name=f"batch {job_id}")

    def _may_begin(self, asked: JobAsk) -> bool:
        under_way = [self._known[job_id] for job_id in self._tasks]
        if any(asked.goes_behind(each) for each in under_way):
            return False
        held = sum(each.size for each in under_way)
        return not under_way or (len(under_way) < MOST_JOBS and held + asked.size <= MOST_BYTES)

    def tasks(self) -> list[asyncio.Task[None]]:
        """Returns the tasks of the jobs under way."""
        return list(self._tasks.values())
