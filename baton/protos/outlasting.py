"""Waits for work that can't be interrupted, such as a thread that writes to somebody's pages.

Knows nothing of the work. A task that waits for it may be cancelled, and cancelled again by another who wants it
gone (a timer, a client that left): none of them may make it say that the work has ended while it has not.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def outlasted(*work: asyncio.Future[T]) -> list[T]:
    """Returns the results of ``work`` once all of it has ended, in order. Nothing of it is cancelled.

    Any number of cancellations meanwhile are heeded when it has ended: then the task's cancellation is raised, else
    the first exception of the work. The task's count of cancellations (``cancelling``) stays as it is.
    """
    cancelled: asyncio.CancelledError | None = None
    while running := [one for one in work if not one.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    failures = [failure for one in work if not one.cancelled() and (failure := one.exception()) is not None]
    if cancelled is not None:
        raise cancelled
    if failures:
        raise failures[0]
    return [one.result() for one in work]
