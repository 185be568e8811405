"""Threads that tenants share fairly: work of many callers runs a few at a time, in turns of their tenants.

Knows nothing of what is computed. A tenant alone has all threads. A thread that comes free goes to a tenant that
has none, so that nobody waits for all that another has in the line.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from baton.grammars.turns import Turns

T = TypeVar("T")


class _Job(Generic[T]):
    """One caller's work and its result, which says also whether the caller has left."""

    def __init__(self, tenant: str, work: Callable[[], T]) -> None:
        self.tenant, self._work = tenant, work
        self.result: Future[T] = Future()

    def run(self, ended: Callable[[_Job[T]], None]) -> None:
        """Does the work; calls ``ended`` before the caller gets the result, or at once if it has left."""
        if not self.result.set_running_or_notify_cancel():
            ended(self)
            return
        try:
            found = self._work()
        except BaseException as error:
            ended(self)
            self.result.set_exception(error)
        else:
            ended(self)
            self.result.set_result(found)


class FairThreads:
    """Runs work in ``threads`` threads, whose names begin with ``name``; event loops may share them."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._turns: Turns[_Job] = Turns(threads, each=threads)  # type: ignore[type-arg]
        self._lock = threading.Lock()  # over the turns, because work ends in its thread

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Returns what ``work`` returns, or raises what it raises, once it is the tenant's turn.

        A caller that is cancelled leaves the line; what runs already goes on and keeps its thread until it ends.
        """
        job = _Job(tenant, work)
        with self._lock:
            self._turns.join(tenant, job)
        self._begin()
        try:
            return await asyncio.wrap_future(job.result)
        except asyncio.CancelledError:
            if job.result.cancel():
                self._ended(job)
            raise

    def _begin(self) -> None:
        with self._lock:
            while (job := self._turns.next()) is not None:
                self._pool.submit(job.run, self._ended)

    def _ended(self, job: _Job[T]) -> None:
        with self._lock:
            self._turns.leave(job.tenant, job)
        self._begin()
