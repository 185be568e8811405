"""The sending side of one request's handoff, in the prefill worker's I/O process.

Knows nothing of the engine, of gRPC or of what a page holds. Blocks go out as soon as they are announced
(``ship``), while later chunks still compute, as many in one frame as are ready (about ``FRAME_BYTES``). A page
is read until it is acknowledged, and never after ``run`` has returned or been cancelled.

    OPEN · BLOCK (as announced; at most ``window_bytes`` unacknowledged) · COMMIT -> the last ACK
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import msgspec

from baton.kv.layout.repaging import ReceiverBlock
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import control, frames
from baton.kv.wire.base import HandoffStream, Transport, resident_bytes
from baton.kv.wire.frames import Block, Frame, Kind
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import ShipBlock
from baton.protos.errors import BatonError, CorruptFrame, WorkerLost
from baton.protos.nouns import KvLayout, TokenRun
from baton.protos.rpc import settled

WINDOW_BYTES = 64 << 20
LAST_WORDS_S = 2.0  # after a send failed: a stream may be broken at our end alone, and then nobody says anything
FRAME_BYTES = 1 << 20  # in one frame: with less the cost per frame shows, with more the first bytes leave late


HandoffItem = ShipBlock | control.Closing | BatonError


class Sender(msgspec.Struct, frozen=True):
    """Who sends: the same for every handoff of a worker."""

    worker_id: str
    model_id: str
    fingerprint: str
    layout: KvLayout


class Destination(msgspec.Struct, frozen=True):
    """Where one request's blocks go: ``total_blocks`` of the prompt, the last with ``tail_tokens`` (1..16)."""

    address: str
    lease: bytes
    epoch: int
    request_id: str
    total_blocks: int
    tail_tokens: int
    adapter_id: str = ""


class HandoffReport(msgspec.Struct, frozen=True):
    """What a handoff took, on the sender's clock.

    ``exposed_s`` ran after the first token was known, by the engine's own word; ``busy_s`` is time with bytes
    unacknowledged.
    """

    shipped_blocks: int
    shipped_bytes: int
    exposed_s: float
    busy_s: float
    address: str = ""


class Handoff:
    """One request's way out. Feed it with ``ship`` and ``commit`` (or ``fail``) while ``run`` runs."""

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
        self._transport = transport
        self._memory = memory
        self._sender = sender
        self._to = destination
        self._clock = clock
        self._window = window_bytes
        self._plan = plan
        self._wire = WirePlan(sender.layout)
        self._frame_bytes, self._from_card = FRAME_BYTES, False
        self._todo: asyncio.Queue[HandoffItem] = asyncio.Queue()
        self._ahead: HandoffItem | None = None  # taken out of the queue, but not a block
        self._ready: deque[ShipBlock | ReceiverBlock] = deque()  # of what was taken out of the queue, not sent yet
        self._unacked: set[int] = set()
        self._unflagged = 0
        self._room = asyncio.Event()
        self._committed_at: float | None = None
        self._taken_over_at: float | None = None
        self._busy_since = 0.0
        self._busy_s = 0.0

    # ---- what the engine says --------------------------------------------------------------------------

    def ship(self, blocks: Iterable[ShipBlock]) -> None:
        """These pages are finished and pinned until ``run`` ends."""
        for block in blocks:
            self._todo.put_nowait(block)

    def commit(self, first: TokenRun, cached_tokens: int, at: float | None = None) -> None:
        """Every block was announced; ``first`` goes with the last frame. It is known since ``at`` (None: now)."""
        now = self._clock()
        self._committed_at = now if at is None else min(at, now)
        self._todo.put_nowait(control.Closing(first, cached_tokens))

    def fail(self, error: BatonError) -> None:
        """The prompt won't be computed: ``run`` raises ``error`` and the stream closes without a commit."""
        self._todo.put_nowait(error)

    # ---- the stream ------------------------------------------------------------------------------------

    async def run(self) -> HandoffReport:
        """Send everything and wait until the decode worker has taken it over.

        Raises the decode worker's typed refusal, WorkerLost when the stream broke, or what ``fail`` was given.
        However it ends (cancellation included), the stream is closed and no page is read any more.
        """
        if self._plan is not None:
            self._wire = await self._plan()
        stream = await self._transport.connect(self._to.address)
        if from_card := resident_bytes(stream):
            self._frame_bytes, self._from_card = from_card, True
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send_all(stream))
                await self._collect(stream)
                sending.cancel()  # everything is there: a lane that broke since is of no interest
                await settled([sending])
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            await stream.close()
        return self._report()

    async def _send_all(self, stream: HandoffStream) -> None:
        async for frame, payload in self._outgoing():
            try:
                await stream.send(frame, payload)
            except WorkerLost:
                await asyncio.sleep(LAST_WORDS_S)  # the collector reads why, if the receiver has said it
                raise

    async def _outgoing(self) -> AsyncIterator[tuple[Frame, list[memoryview]]]:
        yield self._frame(Kind.OPEN, control.encode_opening(self._opening())), []
        while isinstance(item := await self._next(), (ShipBlock, ReceiverBlock)):
            room = await self._has_room()
            yield self._blocks([item, *self._more(room)])
        if isinstance(item, BatonError):
            raise item
        yield self._frame(Kind.COMMIT, control.encode_closing(item)), []

    async def _collect(self, stream: HandoffStream) -> None:
        while (raw := await stream.receive()) is not None:
            frame = frames.decode(raw)
            if frame.kind is Kind.ERROR:
                raise control.decode_error(frame.body)
            if frame.kind is not Kind.ACK or (frame.lease, frame.epoch) != (self._to.lease, self._to.epoch):
                raise CorruptFrame(f"a {frame.kind.name} frame that answers nothing of this handoff", "frame")
            if frame.subject == Kind.COMMIT:
                self._taken_over_at = self._clock()
                self._acknowledged(tuple(self._unacked))
                return
            self._acknowledged(frames.acked_blocks(frame))
        raise WorkerLost(f"the decode worker at {self._to.address} ended the handoff early", "decode_address")

    async def _next(self) -> HandoffItem | ReceiverBlock:
        while not self._ready:
            ahead, self._ahead = self._ahead, None
            item = await self._todo.get() if ahead is None else ahead
            if not isinstance(item, ShipBlock):
                return item
            self._ready.extend(self._wire.take(item))
        return self._ready.popleft()

    async def _has_room(self) -> int:
        """Wait until a block may go; how many may go in its frame besides it."""
        unit = self._wire.unit
        while self._unacked and (len(self._unacked) + 1) * unit > self._window:
            self._room.clear()
            await self._room.wait()
        window = self._window // unit - len(self._unacked)
        return min(window, max(1, self._frame_bytes // unit), frames.MAX_BLOCKS) - 1

    def _more(self, room: int) -> list[ShipBlock | ReceiverBlock]:
        """Blocks that are ready by now, at most ``room``; what isn't a block stays queued behind them."""
        found: list[ShipBlock | ReceiverBlock] = []
        while len(found) < room and (self._ready or (self._ahead is None and not self._todo.empty())):
            if self._ready:
                found.append(self._ready.popleft())
            elif isinstance(item := self._todo.get_nowait(), ShipBlock):
                self._ready.extend(self._wire.take(item))
            else:
                self._ahead = item
        return found

    def _acknowledged(self, blocks: tuple[int, ...]) -> None:
        if not self._unacked.issuperset(blocks):
            raise CorruptFrame("an acknowledgement of blocks that were not sent", "index")
        self._unacked.difference_update(blocks)
        self._room.set()
        if blocks and not self._unacked:
            self._busy_s += self._clock() - self._busy_since

    def _blocks(self, batch: list[ShipBlock | ReceiverBlock]) -> tuple[Frame, list[memoryview]]:
        if not self._unacked:
            self._busy_since = self._clock()
        wire, size = self._wire, self._wire.unit
        found = [wire.payload(block, self._memory) for block in batch]
        payload, offsets = [view for view, _ in found], tuple([at for _, at in found if at is not None])
        self._unacked.update([block.index for block in batch])
        self.shipped_blocks += len(batch)
        self.shipped_bytes += len(batch) * size
        flags = frames.ACK_NOW * self._wants_ack(len(batch) * size)
        if self._from_card and len(offsets) == len(batch) and all(map(_is_resident, batch)):
            flags |= frames.RESIDENT
        frame = self._frame(Kind.BLOCK, flags=flags)
        return msgspec.structs.replace(
            frame,
            unit=size,
            blocks=tuple([Block(block.index, wire.hash(block)) for block in batch]),
            offsets=offsets if len(offsets) == len(batch) else (),
        ), payload

    def _wants_ack(self, size: int) -> bool:
        """Whether the sender may come to wait for it: nothing else is ready, or a quarter window went out."""
        self._unflagged += size
        more = self._ahead is not None or self._ready or not self._todo.empty()
        if more and self._unflagged < self._window // 4:
            return False
        self._unflagged = 0
        return True

    def _frame(self, kind: Kind, body: bytes = b"", flags: int = 0) -> Frame:
        layout, to = self._wire.layout, self._to
        return Frame(kind, to.lease, to.epoch, body, layout.shard_rank, layout.shard_count, flags)

    def _opening(self) -> control.Opening:
        sender, to, paging = self._sender, self._to, self._wire.paging
        return control.Opening(
            request_id=to.request_id,
            layout=self._wire.layout,
            sender=sender.worker_id,
            total_blocks=to.total_blocks if paging is None else paging.blocks,
            tail_tokens=to.tail_tokens if paging is None else paging.tail_tokens,
            model_id=sender.model_id,
            fingerprint=sender.fingerprint,
            adapter_id=to.adapter_id,
        )

    def _report(self) -> HandoffReport:
        assert self._committed_at is not None, "nothing is taken over before its commit"
        assert self._taken_over_at is not None
        exposed = self._taken_over_at - self._committed_at
        return HandoffReport(self.shipped_blocks, self.shipped_bytes, exposed, self._busy_s, self._to.address)


def _is_resident(block: ShipBlock | ReceiverBlock) -> bool:
    return isinstance(block, ShipBlock) and block.resident


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first; the rest only followed from it."""
    error = failures.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
