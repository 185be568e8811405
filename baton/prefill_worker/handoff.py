"""The sending side of one request's handoff, in the prefill worker's I/O process.

Knows nothing of the engine, of gRPC or of what a page holds. Blocks go out as soon as they are announced
(``ship``), while later chunks still compute; each page is copied once, into its frame, so that a page is
never read after ``run`` has returned or been cancelled.

    OPEN · BLOCK (as announced; at most ``window_bytes`` unacknowledged) · COMMIT -> the last ACK
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from baton.kv.memory import PageMemory
from baton.kv.transport import control, frames
from baton.kv.transport.base import HandoffStream, Transport
from baton.kv.transport.frames import Frame, Kind
from baton.protos.channel import ShipBlock
from baton.protos.errors import BatonError, CorruptFrame, WorkerLost
from baton.protos.nouns import KvLayout, TokenRun

WINDOW_BYTES = 32 << 20


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

    ``exposed_s`` ran after the first token was known (``commit``); ``busy_s`` is time with bytes unacknowledged.
    """

    shipped_blocks: int
    shipped_bytes: int
    exposed_s: float
    busy_s: float


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
    ) -> None:
        self.shipped_blocks = 0
        self.shipped_bytes = 0
        self._transport = transport
        self._memory = memory
        self._sender = sender
        self._to = destination
        self._clock = clock
        self._window = window_bytes
        self._todo: asyncio.Queue[ShipBlock | control.Closing | BatonError] = asyncio.Queue()
        self._unacked: set[int] = set()
        self._unflagged = 0
        self._room = asyncio.Event()
        self._committed_at: float | None = None
        self._busy_since = 0.0
        self._busy_s = 0.0

    # ---- what the engine says --------------------------------------------------------------------------

    def ship(self, blocks: Iterable[ShipBlock]) -> None:
        """These pages are finished and pinned until ``run`` ends."""
        for block in blocks:
            self._todo.put_nowait(block)

    def commit(self, first: TokenRun, cached_tokens: int) -> None:
        """Every block was announced; ``first`` goes with the last frame."""
        self._committed_at = self._clock()
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
        stream = await self._transport.connect(self._to.address)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_all(stream))
                await self._collect(stream)
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            await stream.close()
        return self._report()

    async def _send_all(self, stream: HandoffStream) -> None:
        async for frame in self._outgoing():
            try:
                await stream.send(frame)
            except WorkerLost:
                return  # the stream is over: the collector reads why

    async def _outgoing(self) -> AsyncIterator[bytes]:
        yield self._frame(Kind.OPEN, control.encode_opening(self._opening()))
        while isinstance(item := await self._todo.get(), ShipBlock):
            await self._has_room()
            yield self._block(item)
        if isinstance(item, BatonError):
            raise item
        yield self._frame(Kind.COMMIT, control.encode_closing(item))

    async def _collect(self, stream: HandoffStream) -> None:
        while (raw := await stream.receive()) is not None:
            frame = frames.decode(raw)
            if frame.kind is Kind.ERROR:
                raise control.decode_error(frame.payload)
            if frame.kind is not Kind.ACK or (frame.lease, frame.epoch) != (self._to.lease, self._to.epoch):
                raise CorruptFrame(f"a {frame.kind.name} frame that answers nothing of this handoff", "frame")
            if frame.subject == Kind.COMMIT:
                self._acknowledged(tuple(self._unacked))
                return
            self._acknowledged(frames.acked_blocks(frame))
        raise WorkerLost(f"the decode worker at {self._to.address} ended the handoff early", "decode_address")

    async def _has_room(self) -> None:
        page_bytes = self._sender.layout.page_bytes
        while self._unacked and (len(self._unacked) + 1) * page_bytes > self._window:
            self._room.clear()
            await self._room.wait()

    def _acknowledged(self, blocks: tuple[int, ...]) -> None:
        if not self._unacked.issuperset(blocks):
            raise CorruptFrame("an acknowledgement of blocks that were not sent", "index")
        self._unacked.difference_update(blocks)
        self._room.set()
        if blocks and not self._unacked:
            self._busy_s += self._clock() - self._busy_since

    def _block(self, block: ShipBlock) -> bytes:
        if not self._unacked:
            self._busy_since = self._clock()
        self._unacked.add(block.index)
        self.shipped_blocks += 1
        self.shipped_bytes += self._sender.layout.page_bytes
        return self._frame(
            Kind.BLOCK, self._memory.page(block.page), block.index, block.hash, frames.ACK_NOW * self._wants_ack()
        )

    def _wants_ack(self) -> bool:
        """Whether the sender may come to wait for it: nothing else is ready, or a quarter window went out."""
        self._unflagged += self._sender.layout.page_bytes
        if not self._todo.empty() and self._unflagged < self._window // 4:
            return False
        self._unflagged = 0
        return True

    def _frame(
        self, kind: Kind, payload: bytes | memoryview, index: int = 0, block: bytes = frames.NO_HASH, flags: int = 0
    ) -> bytes:
        layout, to = self._sender.layout, self._to
        shard = (layout.shard_rank, layout.shard_count)
        return frames.encode(Frame(kind, to.lease, to.epoch, index, block, *shard, flags, payload=payload))

    def _opening(self) -> control.Opening:
        sender, to = self._sender, self._to
        return control.Opening(
            request_id=to.request_id,
            layout=sender.layout,
            sender=sender.worker_id,
            total_blocks=to.total_blocks,
            tail_tokens=to.tail_tokens,
            model_id=sender.model_id,
            fingerprint=sender.fingerprint,
            adapter_id=to.adapter_id,
        )

    def _report(self) -> HandoffReport:
        exposed = 0.0 if self._committed_at is None else self._clock() - self._committed_at
        return HandoffReport(self.shipped_blocks, self.shipped_bytes, exposed, self._busy_s)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first; the rest only followed from it."""
    error = failures.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
