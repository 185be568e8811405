"""Bytes of one direction of a simulated call, and names that both ends use. Knows nothing of services."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

WINDOW_BYTES = 64 << 10  # bytes of one call and direction that may wait unread, as in HTTP/2
EOF = grpc.aio.EOF
Metadata = Sequence[tuple[str, str | bytes]]
Status = tuple[grpc.StatusCode, str, Metadata]
UNAVAILABLE, CANCELLED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED


class Stream:
    """Messages of one direction of a call, as their reader sees them."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._unread = 0
        self._ended = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def sending(self, size: int) -> None:
        """Counts bytes as sent and not yet read."""
        self._unread += size
        if self._unread > WINDOW_BYTES:
            self._room.clear()

    def arrive(self, data: bytes) -> None:
        """Takes a message from the network."""
        self._waiting.append(data)
        self._news.set()

    def end(self) -> None:
        """Notes that nothing follows."""
        self._ended = True
        self._news.set()
        self._room.set()

    def drop(self) -> None:
        """Forgets what waits unread, as where a call is reset."""
        self._waiting.clear()

    def open_window(self) -> None:
        """Lets go of a writer that waits for room: its call is over."""
        self._room.set()

    async def room(self) -> None:
        """Returns when the window has room; other tasks take a turn before."""
        await asyncio.sleep(0)
        await self._room.wait()

    async def next(self) -> bytes | None:
        """Returns the next message, or None after the last."""
        while not self._waiting and not self._ended:
            self._news.clear()
            await self._news.wait()
        if not self._waiting:
            return None
        data = self._waiting.popleft()
        self._unread -= len(data)
        if self._unread <= WINDOW_BYTES:
            self._room.set()
        return data


def same(message: Any) -> Any:
    """Returns the message: where bytes are bytes, nothing is serialized."""
    return message
