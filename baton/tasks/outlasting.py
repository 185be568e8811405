"""Waiting for work that must not be interrupted, such as a thread that writes to KV pages.

Knows nothing of the work. The waiting task may be cancelled any number of times; the wait ends only when the work
has.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def outlasted(*work: asyncio.Future[T]) -> list[T]:
    """Returns the results of ``work``, in order, once all of it has ended; none of it is cancelled.

    If the task was cancelled meanwhile, raises CancelledError afterwards, else the first exception of the work. The
    task's count of cancellations (``cancelling``) is unchanged.
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
