"""Ends streams of gRPC whose client takes nothing any more: HTTP/2 would let it hold an answer for ever.

Knows nothing of what is streamed. REST's connections are cut off by the kernel (``router.server.UNREAD_S``); here
the connection lives, and only the stream's window is full.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

T = TypeVar("T")
UNREAD_S = 300.0  # seconds for which a client may take nothing of a stream
LOOKS = 4  # looks at a stream in that time


class UnreadWatch:
    """Cancels the task that it is made in once what it gave to the client has waited for UNREAD_S; ``end`` it."""

    def __init__(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._given_at: float | None = None
        self._timer = self._loop.call_later(UNREAD_S / LOOKS, self._look)

    def given(self) -> None:
        """Notes that the client is given something."""
        self._given_at = self._loop.time()

    def taken(self) -> None:
        """Notes that it went out."""
        self._given_at = None

    def end(self) -> None:
        """Stops looking at the stream, which has ended. Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._given_at is not None and self._loop.time() - self._given_at > UNREAD_S and self._task is not None:
            self._task.cancel()
            return
        self._timer = self._loop.call_later(UNREAD_S / LOOKS, self._look)


async def while_taken(responses: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yields ``responses``; the stream's task is cancelled if its client takes none for UNREAD_S."""
    watch = UnreadWatch()
    try:
        async for response in responses:
            watch.given()
            yield response
            watch.taken()
    finally:
        watch.end()
