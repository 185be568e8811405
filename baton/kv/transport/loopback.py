"""Frames between two coroutines of one process; every frame is copied, as a wire would.

Knows nothing of frames' contents. For tests and simulation: no socket, the same order and flow control.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from baton.kv.transport.base import HandoffStream, Serve
from baton.protos.errors import WorkerLost

_QUEUED_FRAMES = 4


class LoopbackStream:
    """One stream: a queue each way and the receiver's task."""

    def __init__(self, serve: Serve) -> None:
        self._up: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUED_FRAMES)
        self._down: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(serve))
        self._task.add_done_callback(self._over)

    async def send(self, frame: bytes) -> None:
        """Copy ``frame`` to the receiver; waits while it is behind."""
        if self._ended.is_set():
            raise WorkerLost("the handoff stream has ended", "decode_address")
        put = asyncio.ensure_future(self._up.put(bytes(bytearray(frame))))
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({put, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not put.done():
                raise WorkerLost("the handoff stream has ended", "decode_address")
        finally:
            put.cancel()
            ended.cancel()

    async def receive(self) -> bytes | None:
        """The next frame back."""
        frame = None if self._ended.is_set() and self._down.empty() else await self._down.get()
        if frame is None and (self._task.cancelled() or self._task.exception() is not None):
            why = "cancelled" if self._task.cancelled() else self._task.exception()
            raise WorkerLost(f"the handoff stream broke: {why}", "decode_address")
        return frame

    async def close(self) -> None:
        """Cancel the receiver's task."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self, serve: Serve) -> None:
        async with aclosing(serve(self._frames())) as replies:
            async for reply in replies:
                self._down.put_nowait(bytes(bytearray(reply)))

    def _over(self, _: asyncio.Task[None]) -> None:
        self._ended.set()
        self._down.put_nowait(None)

    async def _frames(self) -> AsyncIterator[bytes]:
        while (frame := await self._up.get()) is not None:
            yield frame


class LoopbackTransport:
    """Receivers by address."""

    def __init__(self, receivers: dict[str, Serve] | None = None) -> None:
        self.receivers: dict[str, Serve] = dict(receivers or {})
        self._streams: list[LoopbackStream] = []

    async def connect(self, address: str) -> HandoffStream:
        """A stream to the receiver at ``address``."""
        if address not in self.receivers:
            raise WorkerLost(f"no decode worker listens at {address}", "decode_address")
        stream = LoopbackStream(self.receivers[address])
        self._streams.append(stream)
        return stream

    async def close(self) -> None:
        """Close every stream."""
        for stream in self._streams:
            await stream.close()
        self._streams.clear()
