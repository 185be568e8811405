"""One direction of a simulated call with its flow control, and names that both ends use.

Knows nothing of services.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

WINDOW_BYTES = 64 << 10  # bytes of one call and direction that may wait unread, as in HTTP/2
EOF = grpc.aio.EOF
Message = Any  # of protobuf's classes, whose types its generated code doesn't give; bytes without a serializer
Serialize = Callable[[Message], bytes]
Deserialize = Callable[[bytes], Message]
Metadata = Sequence[tuple[str, str | bytes]]
Status = tuple[grpc.StatusCode, str, Metadata]
UNAVAILABLE, CANCELLED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED


class Stream:
    """The messages of one direction of a call, from their arrival to their reading, with a flow-control window."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._unread = 0
        self._ended = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def sending(self, size: int) -> None:
        """Counts ``size`` bytes as sent but unread; the window is full above WINDOW_BYTES."""
        self._unread += size
        if self._unread > WINDOW_BYTES:
            self._room.clear()

    def arrive(self, data: bytes) -> None:
        """Adds a message that arrived from the network."""
        self._waiting.append(data)
        self._news.set()

    def end(self) -> None:
        """Marks that no further message follows; a waiting reader or writer continues."""
        self._ended = True
        self._news.set()
        self._room.set()

    def drop(self) -> None:
        """Discards the messages that wait unread, as when a call is reset."""
        self._waiting.clear()

    def open_window(self) -> None:
        """Lets a writer that waits for room continue, because its call is over."""
        self._room.set()

    async def room(self) -> None:
        """Waits until the window has room; other tasks run at least once before it returns."""
        await asyncio.sleep(0)
        await self._room.wait()

    async def next(self) -> bytes | None:
        """Waits for the next message and returns it; None after the last."""
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


def same(message: Message) -> Message:
    """Returns ``message`` unchanged; stands in for a serializer if messages are bytes."""
    return message
