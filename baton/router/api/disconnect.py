"""Runs work for an ASGI client that may disconnect.

Knows nothing of what the work is. The request's body must have been read: after it, ``receive`` brings only the
news that the client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.types import Receive

from baton.protos.errors import Cancelled

T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Coroutine[object, None, T]) -> T:
    """Runs ``work`` and returns its result.

    If the client disconnects first, ``work`` is cancelled at once and Cancelled is raised.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client went away")
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
