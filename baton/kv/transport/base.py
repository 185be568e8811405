"""What a transport is: a way to open a two-way stream of frames to a decode worker.

Knows nothing of what the frames say. A transport is one file in this folder; its name in the config is the file's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol

Serve = Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes, None]]
"""The receiving side: frames in, frames out; it ends the stream by returning (``Intake.serve``)."""


class HandoffStream(Protocol):
    """One stream, the sender's end. Frames arrive whole and in order, or not at all."""

    async def send(self, frame: bytes) -> None:
        """Hand ``frame`` over; waits while the receiver is slow. Raises WorkerLost when the stream has ended."""

    async def receive(self) -> bytes | None:
        """The next frame back; None at the stream's orderly end. Raises WorkerLost when it broke."""

    async def close(self) -> None:
        """End the stream at once, whatever is in flight; again does nothing."""


class Transport(Protocol):
    """Streams to any number of decode workers."""

    async def connect(self, address: str) -> HandoffStream:
        """A new stream to ``address``. Raises WorkerLost, now or at the first send, where nobody answers."""

    async def close(self) -> None:
        """Close every stream and connection."""
