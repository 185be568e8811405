"""Carries frames between two coroutines of one process; every frame is copied, as by a network.

Knows nothing of frames' contents. It is for tests and simulation: it has no sockets, but the order and flow control
of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from baton.kv.wire.base import Accept, HandoffStream, QueuedReplyStream, deliver, message
from baton.kv.wire.frames import Frame
from baton.protos.errors import WorkerLost

_QUEUED_FRAMES = 4  # frames that wait for the receiver at most


class LoopbackStream:
    """Implements ``HandoffStream`` by a queue each way and a task that delivers to the receiver.

    ``ending`` is called with the stream when that task has ended.
    """

    def __init__(self, accept: Accept, ending: Callable[[LoopbackStream], None]) -> None:
        self._ending = ending
        self._up: asyncio.Queue[bytes] = asyncio.Queue(_QUEUED_FRAMES)
        self._line = QueuedReplyStream()
        self._sink = accept(self._line)
        self._ended = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._over)

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """Copies ``frame`` and its blocks to the receiver and waits while the receiver's queue is full. Raises
        WorkerLost.
        """
        if self._ended.is_set() or self._line.ended:
            raise _gone()
        put = asyncio.ensure_future(self._up.put(message(frame, payload)))
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({put, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not put.done():
                raise _gone()
        finally:
            put.cancel()
            ended.cancel()

    async def receive(self) -> bytes | None:
        """Returns a copy of the next encoded reply, or None at the end. Raises WorkerLost."""
        frame = await self._line.get()
        if frame is not None:
            return bytes(bytearray(frame))
        self._line = QueuedReplyStream()  # every later receive finds the end again
        self._line.end()
        if self._task.cancelled() or (self._task.done() and self._task.exception() is not None):
            why = "closed" if self._task.cancelled() else self._task.exception()
            raise WorkerLost(f"the handoff stream broke: {why}", "decode_address")
        return None

    async def close(self) -> None:
        """Cancels the receiver's task and waits for its end."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        while not self._line.ended:
            deliver(self._sink, await self._up.get())

    def _over(self, _: asyncio.Task[None]) -> None:
        self._ended.set()
        self._sink.over(None)
        self._line.end()
        self._ending(self)


class LoopbackTransport:
    """Implements ``Transport`` to receivers of the same process, by their address in ``receivers``."""

    def __init__(self, receivers: dict[str, Accept] | None = None) -> None:
        self.receivers: dict[str, Accept] = dict(receivers or {})
        self._streams: dict[LoopbackStream, None] = {}  # in the order in which they were opened

    async def connect(self, address: str) -> HandoffStream:
        """Returns a stream to the receiver at ``address``. Raises WorkerLost if there is none."""
        if address not in self.receivers:
            raise WorkerLost(f"no decode worker listens at {address}", "decode_address")
        stream = LoopbackStream(self.receivers[address], self._forget)
        self._streams[stream] = None
        return stream

    async def close(self) -> None:
        """Closes every open stream."""
        for stream in tuple(self._streams):
            await stream.close()

    def _forget(self, stream: LoopbackStream) -> None:
        self._streams.pop(stream, None)


def _gone() -> WorkerLost:
    return WorkerLost("the handoff stream has ended", "decode_address")
