"""Runs work beside a block, in a lasting task that ends with it.

Knows nothing of the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.tasks.lasting import Work, lasting


@asynccontextmanager
async def beside(work: Work, name: str) -> AsyncIterator[None]:
    """Runs ``work()`` as ``lasting`` does while entered, then cancels it and waits until it has ended."""
    task = lasting(work, name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
