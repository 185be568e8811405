"""Runs work beside a block, in a task that ends with it.

Knows nothing of the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def beside(work: Coroutine[object, None, object], name: str) -> AsyncIterator[None]:
    """Runs ``work`` in a task called ``name`` while entered, then cancels it and waits until it has ended."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
