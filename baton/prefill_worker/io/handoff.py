"""The sending side of one request's KV handoff, in the prefill worker's I/O process.

Knows nothing of the engine, of gRPC or of what a page holds. Blocks are sent as soon as they are announced
(``ship``), while later chunks still compute, as many in one frame as are ready (about ``FRAME_BYTES``). A page is
read until it is acknowledged, and never after ``run`` has returned or been cancelled.

    OPEN · BLOCK (as announced; at most ``window_bytes`` unacknowledged) · COMMIT -> the last ACK
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import msgspec

from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import control, frames
from baton.kv.wire.base import HandoffStream, Transport, resident_bytes
from baton.kv.wire.frames import Frame, Kind
from baton.prefill_worker.io.handoff_frames import Destination, HandoffFrames, Sender
from baton.prefill_worker.io.send_queue import SendQueue
from baton.prefill_worker.io.send_window import SendWindow
from baton.prefill_worker.io.wire_plan import SentBlock, WirePlan
from baton.protos.channel import ShipBlock
from baton.protos.errors import BatonError, CorruptFrame, WorkerLost
from baton.protos.nouns import TokenRun
from baton.protos.rpc import settled

# Bytes that may be unacknowledged: enough for a fast link's round trip, little enough for a slow receiver's memory.
WINDOW_BYTES = 64 << 20
# Seconds for the receiver's reason after a send failed: where the stream broke at our end alone, none ever comes.
LAST_WORDS_S = 2.0
# Bytes in a frame: with less the cost per frame shows, with more the first bytes leave late.
FRAME_BYTES = 1 << 20


class HandoffReport(msgspec.Struct, frozen=True):
    """A summary of one handoff: its size, and its durations by the sender's clock."""

    shipped_blocks: int
    shipped_bytes: int
    exposed_s: float  # seconds from the first token, as the engine reports it, to the end
    busy_s: float  # seconds with unacknowledged bytes
    address: str = ""  # of the decode worker


class Handoff:
    """Sends one request's blocks to a decode worker. Call ``ship`` and then ``commit`` (or ``fail``) while ``run``
    runs.

    ``plan`` returns how the blocks are converted for the receiver, None: not at all. ``clock`` is in monotonic
    seconds.
    """

    def __init__(
        self,
        transport: Transport,
        memory: PageMemory,
        sender: Sender,
        destination: Destination,
        clock: Callable[[], float],
        window_bytes: int = WINDOW_BYTES,
        plan: Callable[[], Awaitable[WirePlan]] | None = None,
    ) -> None:
        self.shipped_blocks = 0
        self.shipped_bytes = 0
        self._transport, self._memory, self._sender, self._to = transport, memory, sender, destination
        self._clock, self._plan = clock, plan
        self._frame_bytes = FRAME_BYTES
        self._queue, self._window = SendQueue(), SendWindow(window_bytes, clock)
        self._committed_at: float | None = None
        self._taken_over_at: float | None = None

    # ---- what the engine says --------------------------------------------------------------------------

    def ship(self, blocks: Iterable[ShipBlock]) -> None:
        """Queues ``blocks``, whose pages are finished and must stay pinned until ``run`` ends."""
        for block in blocks:
            self._queue.put(block)

    def commit(self, first: TokenRun, cached_tokens: int, at: float | None = None) -> None:
        """Queues the end of the handoff, after the last block: the first token and the number of cached prompt
        tokens.

        ``at`` is when the first token was known, None: now.
        """
        now = self._clock()
        self._committed_at = now if at is None else min(at, now)
        self._queue.put(control.Closing(first, cached_tokens))

    def fail(self, error: BatonError) -> None:
        """Ends the handoff without a commit, because the prompt won't be computed: ``run`` raises ``error``."""
        self._queue.put(error)

    # ---- the stream ------------------------------------------------------------------------------------

    async def run(self, wire: WirePlan | None = None) -> HandoffReport:
        """Sends everything and waits until the decode worker has taken it over; returns a report. ``wire`` counts
        instead of what ``plan`` says.

        Raises the decode worker's typed refusal, WorkerLost if the stream broke, or the error given to ``fail``.
        However it ends (cancellation included), the stream is closed and no page is read any more.
        """
        if wire is None:
            wire = WirePlan(self._sender.layout) if self._plan is None else await self._plan()
        stream = await self._transport.connect(self._to.address)
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send_all(stream, wire))
                await self._collect(stream)
                sending.cancel()  # everything is there: a lane that broke since is of no interest
                await settled([sending])
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            await stream.close()
        return self._report()

    async def _send_all(self, stream: HandoffStream, wire: WirePlan) -> None:
        from_card = resident_bytes(stream)
        made = HandoffFrames(self._memory, self._sender, self._to, wire, bool(from_card))
        async for frame, payload in self._outgoing(made, wire, from_card or self._frame_bytes):
            try:
                await stream.send(frame, payload)
            except WorkerLost:
                await asyncio.sleep(LAST_WORDS_S)  # the collector reads why, if the receiver has said it
                raise

    async def _outgoing(
        self, made: HandoffFrames, wire: WirePlan, frame_bytes: int
    ) -> AsyncIterator[tuple[Frame, list[memoryview]]]:
        yield made.opening(), []
        most = min(max(1, frame_bytes // wire.unit), frames.MAX_BLOCKS)
        while isinstance(item := await self._queue.next(wire), SentBlock):
            room = min(await self._window.room(wire.unit), most)
            batch = [item, *self._queue.more(wire, room - 1)]
            yield made.blocks(batch, self._count(batch, wire.unit))
        if isinstance(item, BatonError):
            raise item
        yield made.commit(item), []

    def _count(self, batch: list[SentBlock], unit: int) -> bool:
        """Counts ``batch`` as sent; returns whether its frame should ask for an acknowledgement."""
        self._window.sent([block.index for block in batch])
        self.shipped_blocks += len(batch)
        self.shipped_bytes += len(batch) * unit
        return self._window.wants_ack(len(batch) * unit, self._queue.has_more)

    async def _collect(self, stream: HandoffStream) -> None:
        while (raw := await stream.receive()) is not None:
            frame = frames.decode(raw)
            if frame.kind is Kind.ERROR:
                raise control.decode_error(frame.body)
            if frame.kind is not Kind.ACK or (frame.lease, frame.epoch) != (self._to.lease, self._to.epoch):
                raise CorruptFrame(f"a {frame.kind.name} frame that answers nothing of this handoff", "frame")
            if frame.subject == Kind.COMMIT:
                self._taken_over_at = self._clock()
                self._window.all_acknowledged()
                return
            self._window.acknowledged(frames.acked_blocks(frame))
        raise WorkerLost(f"the decode worker at {self._to.address} ended the handoff early", "decode_address")

    def _report(self) -> HandoffReport:
        assert self._committed_at is not None, "nothing is taken over before its commit"
        assert self._taken_over_at is not None
        exposed, busy = self._taken_over_at - self._committed_at, self._window.busy_s
        return HandoffReport(self.shipped_blocks, self.shipped_bytes, exposed, busy, self._to.address)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the failure that came first, which caused the others."""
    error = failures.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
