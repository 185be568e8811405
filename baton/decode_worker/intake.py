"""The receiving side of handoffs, in the decode worker's I/O process: check each frame, then write its page.

Knows nothing of gRPC, of the page pool or of sequences. The engine says which pages a lease may fill
(``register``); a frame writes only when its lease, epoch, shard, index, hash and checksum are all right,
and only before the commit. Everything from check to write happens without an await in between, so a stream
that was closed or whose lease moved on writes no more from that moment.

    OPEN -> ReceiveOpened · BLOCK … -> BlocksReceived · COMMIT -> Commit, Committed -> ACK · end -> ReceiveClosed
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from baton.kv.layout import require_same
from baton.kv.memory import PageMemory
from baton.kv.transport import control, frames
from baton.kv.transport.frames import Frame, Kind
from baton.protos.channel import BlocksReceived, Commit, ReceiveClosed, ReceiveOpened
from baton.protos.errors import (
    AlreadyCommitted,
    BatonError,
    CorruptFrame,
    ForeignBlock,
    HandoffRefused,
    LayoutMismatch,
    LeaseUnknown,
    StaleEpoch,
)
from baton.protos.nouns import KvLayout

REPORT_BLOCKS = 64


class _Claim:
    """What may be written for one request, and what has been."""

    def __init__(
        self, key: int, lease: bytes, epoch: int, pages: Sequence[int], hashes: Sequence[bytes], held: int
    ) -> None:
        self.key = key
        self.lease = lease
        self.epoch = epoch
        self.pages = tuple(pages)
        self.hashes = tuple(hashes)
        self.held = held
        self.received: set[int] = set()
        self.committing = False
        self.stream: _Stream | None = None

    @property
    def missing(self) -> list[int]:
        """Blocks that are still to come."""
        return [i for i in range(self.held, len(self.hashes)) if i not in self.received]


class _Stream:
    """One handoff stream: its claim once OPEN was accepted, what it brought, and why it was stopped."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.claim: _Claim | None = None
        self.epoch = 0
        self.seen: set[int] = set()
        self.unacked: list[int] = []
        self.unreported: list[int] = []
        self.committed: asyncio.Future[None] = loop.create_future()
        self.stopped: asyncio.Future[BatonError] = loop.create_future()

    def stop(self, error: BatonError) -> None:
        """End the stream with ``error`` as soon as its coroutine runs."""
        if not self.stopped.done():
            self.stopped.set_result(error)


class Intake:
    """Every handoff to this worker. ``send_to_engine`` must not block."""

    def __init__(
        self,
        memory: PageMemory,
        layout: KvLayout,
        fingerprint: str,
        send_to_engine: Callable[[msgspec.Struct], None],
    ) -> None:
        self.refusals: Counter[str] = Counter()
        self.received_blocks = 0
        self.received_bytes = 0
        self._memory = memory
        self._layout = layout
        self._fingerprint = fingerprint
        self._tell = send_to_engine
        self._by_key: dict[int, _Claim] = {}
        self._by_lease: dict[bytes, _Claim] = {}

    # ---- what the engine and the session say -----------------------------------------------------------

    def register(
        self, key: int, lease: bytes, epoch: int, pages: Sequence[int], hashes: Sequence[bytes], held: int
    ) -> None:
        """The engine admitted ``key``: blocks ``held``… of ``hashes`` may be written to their ``pages``."""
        claim = _Claim(key, lease, epoch, pages, hashes, held)
        self._by_key[key] = self._by_lease[lease] = claim

    def rearm(self, key: int, epoch: int) -> None:
        """Only ``epoch`` counts from now on; blocks that are in stay in. Call it before the engine hears of it."""
        claim = self._by_key.get(key)
        if claim is None or epoch <= claim.epoch:
            return
        claim.epoch = epoch
        if claim.stream is not None:
            self._end(claim.stream, StaleEpoch(f"epoch {epoch} took over from {claim.stream.epoch}", "epoch"))

    def close(self, key: int, error: BatonError | None = None) -> None:
        """The lease is closed: nothing is written for it from this moment. An open stream ends with ``error``."""
        claim = self._by_key.pop(key, None)
        if claim is None:
            return
        del self._by_lease[claim.lease]
        if claim.stream is not None:  # not so once committed: that one only has its last ACK to send
            self._end(
                claim.stream, error or LeaseUnknown("the lease was closed; the request has ended here", "lease")
            )

    def on_committed(self, key: int, epoch: int) -> None:
        """The engine took the handoff over: the sender gets its last acknowledgement, whatever happens next."""
        claim = self._by_key.get(key)
        stream = None if claim is None else claim.stream
        if stream is not None and stream.epoch == epoch and not stream.committed.done():
            self._leave(stream)  # first: a close that follows at once must not turn this into a refusal
            stream.committed.set_result(None)

    @property
    def open_streams(self) -> int:
        """Streams that may write."""
        return sum(claim.stream is not None for claim in self._by_key.values())

    # ---- one stream ------------------------------------------------------------------------------------

    async def serve(self, incoming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Frames in, acknowledgements out; ends after the commit, the sender's end, or the first refusal."""
        stream = _Stream()
        try:
            while (raw := await _first(anext(incoming, None), stream.stopped)) is not None:
                frame = frames.decode(raw)
                for reply in self._take(frame, stream):
                    yield reply
                if frame.kind is Kind.COMMIT:
                    await _first(stream.committed, stream.stopped)
                    yield frames.ack(frame)
                    return
        except BatonError as error:
            self.refusals[error.label] += 1
            self._leave(stream)
            yield _refusal(stream, error)
        finally:
            self._leave(stream)

    def _take(self, frame: Frame, stream: _Stream) -> list[bytes]:
        """Act on one intact frame; the replies that are due. Nothing has happened when it raises."""
        claim = self._claim(frame)
        if frame.kind is Kind.OPEN:
            return self._open(frame, claim, stream)
        if stream.claim is not claim:
            raise HandoffRefused("the frame's lease is not the one this stream was opened for", "lease")
        if frame.kind is Kind.BLOCK:
            return self._write(frame, claim, stream)
        if frame.kind is Kind.COMMIT:
            return self._commit(frame, claim, stream)
        raise CorruptFrame(f"a sender sends no {frame.kind.name} frame", "kind")

    def _claim(self, frame: Frame) -> _Claim:
        claim = self._by_lease.get(frame.lease)
        if claim is None:
            raise LeaseUnknown(
                "no such lease here: it ended, or is another worker's; admit the request again", "lease"
            )
        if frame.epoch != claim.epoch:
            raise StaleEpoch(f"the frame is of epoch {frame.epoch}; {claim.epoch} is in force", "epoch")
        if claim.committing:
            raise AlreadyCommitted("the handoff is complete: the request is decoding", "lease")
        if (frame.shard_rank, frame.shard_count) != (self._layout.shard_rank, self._layout.shard_count):
            raise LayoutMismatch(
                f"the frame is for shard {frame.shard_rank} of {frame.shard_count}; this worker is "
                f"{self._layout.shard_rank} of {self._layout.shard_count}",
                "shard_rank",
            )
        return claim

    def _open(self, frame: Frame, claim: _Claim, stream: _Stream) -> list[bytes]:
        if claim.stream is not None:
            raise HandoffRefused("a handoff of this lease and epoch is already open", "lease")
        if stream.claim is not None:
            raise HandoffRefused("this stream was already opened", "kind")
        opening = control.decode_opening(frame.payload)
        require_same(opening.layout, self._layout)
        if opening.fingerprint != self._fingerprint:
            raise LayoutMismatch(
                f"the blocks are of weights {opening.fingerprint[:16]}…, this worker runs "
                f"{self._fingerprint[:16]}…; start both with the same checkpoint",
                "fingerprint",
            )
        if opening.total_blocks != len(claim.hashes):
            raise ForeignBlock(
                f"the sender's prompt has {opening.total_blocks} blocks, the lease {len(claim.hashes)}",
                "total_blocks",
            )
        stream.claim, stream.epoch, claim.stream = claim, claim.epoch, stream
        self._tell(ReceiveOpened(claim.key, claim.epoch))
        return [frames.ack(frame)]

    def _write(self, frame: Frame, claim: _Claim, stream: _Stream) -> list[bytes]:
        index = frame.index
        if not claim.held <= index < len(claim.hashes):
            raise ForeignBlock(f"block {index} is not among {claim.held}…{len(claim.hashes) - 1}", "index")
        if frame.hash != claim.hashes[index]:
            raise ForeignBlock(f"block {index} has another hash: it is of other tokens", "hash")
        if index in stream.seen:
            raise ForeignBlock(f"block {index} came twice on one stream", "index")
        if len(frame.payload) != self._layout.page_bytes:
            raise LayoutMismatch(
                f"a page has {self._layout.page_bytes} bytes, the frame carries {len(frame.payload)}", "payload"
            )
        assert claim.stream is stream, "a stream that was ended must not write"
        self._memory.page(claim.pages[index])[:] = frame.payload
        stream.seen.add(index)
        claim.received.add(index)
        stream.unacked.append(index)
        stream.unreported.append(index)
        self.received_blocks += 1
        self.received_bytes += len(frame.payload)
        return self._acknowledge(frame, stream)

    def _acknowledge(self, frame: Frame, stream: _Stream) -> list[bytes]:
        if not frame.wants_ack and len(stream.unacked) < REPORT_BLOCKS:
            return []
        self._report(stream)
        blocks, stream.unacked = stream.unacked, []
        return [frames.ack(frame, blocks)]

    def _commit(self, frame: Frame, claim: _Claim, stream: _Stream) -> list[bytes]:
        missing = claim.missing
        if missing:
            raise HandoffRefused(f"{len(missing)} blocks are missing, the first is {missing[0]}", "blocks")
        closing = control.decode_closing(frame.payload)
        self._report(stream)
        claim.committing = True
        self._tell(Commit(claim.key, stream.epoch, closing.first, closing.cached_tokens))
        return []

    def _report(self, stream: _Stream) -> None:
        if stream.claim is not None and stream.unreported:
            self._tell(BlocksReceived(stream.claim.key, stream.epoch, tuple(stream.unreported)))
            stream.unreported = []

    def _end(self, stream: _Stream, error: BatonError) -> None:
        self._leave(stream)
        stream.stop(error)

    def _leave(self, stream: _Stream) -> None:
        """The stream writes no more; the engine hears it once."""
        claim = stream.claim
        if claim is None or claim.stream is not stream:
            return
        self._report(stream)
        claim.stream = None
        self._tell(ReceiveClosed(claim.key, stream.epoch))


def _refusal(stream: _Stream, error: BatonError) -> bytes:
    lease = frames.NO_LEASE if stream.claim is None else stream.claim.lease
    return frames.encode(Frame(Kind.ERROR, lease, stream.epoch, payload=control.encode_error(error)))


async def _first(awaited: Any, stopped: asyncio.Future[BatonError]) -> Any:
    """The result of ``awaited``; raises the error of ``stopped`` if that comes first."""
    coming = asyncio.ensure_future(awaited)
    try:
        await asyncio.wait({coming, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            raise stopped.result()
        return coming.result()
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})
