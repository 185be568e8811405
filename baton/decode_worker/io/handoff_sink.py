"""Receives one handoff stream: checks each frame, says where its blocks are to be written, and counts verified
blocks.

Knows nothing of transports, of the page pool or of sequences. A block is *received* once its bytes are in its page
and their checksum was compared; until then it counts as missing and the commit is refused. All checks run before a
place is given out, and a stream that was stopped gives out no place and counts nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.decode_worker.io.handoff_leases import HandoffLeases
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.layout.bridge import codec_of, land, land_part, shard_of, wire_bytes
from baton.kv.layout.extents import Part, contiguous, part_bytes, require_part, scatter
from baton.kv.layout.page import require_same
from baton.kv.wire import control, frames
from baton.kv.wire.base import ReplyStream
from baton.kv.wire.frames import Block, Frame, Kind
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

REPORT_BLOCKS = 64  # blocks at most between two reports to the engine, so that a commit has little left to tell
MAX_PROBE_BYTES = 8 << 20  # of a preflight's frame, because anybody may send one


class HandoffSink:
    """Takes the frames of one stream (a Sink). ``leases`` has also the pages and the channel to the engine."""

    def __init__(self, leases: HandoffLeases, line: ReplyStream) -> None:
        self.lease: IntakeLease | None = None
        self.epoch = 0
        self.rank = self.shards = 0
        self._layout = leases.layout  # of what comes: ours, or the part of ours that the sender holds
        self._extents: Part = ()  # of a page that comes, if it comes from several hosts
        self._leases = leases
        self._line = line
        self._stopped = False
        self._placed: set[int] = set()
        self._coded: dict[int, memoryview] = {}  # landed beside their pages, where a codec is in use
        self._unacked: list[int] = []
        self._unreported: list[int] = []
        self._resident: list[int] = []  # of those, what is on the device as well
        self._commit_frame: Frame | None = None

    # ---- what the transport says -----------------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        """Handles an OPEN or a COMMIT frame; refuses the stream if the frame is wrong."""
        self._guarded(self._control, frame)

    def place(self, frame: Frame) -> Sequence[memoryview] | None:
        """Returns the memory for the blocks that ``frame`` announces; None if the frame, and so the stream, is
        refused.
        """
        places: list[memoryview] = []
        self._guarded(lambda f: places.extend(self._places(f)), frame)
        return None if self._stopped else places

    def landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        """Counts the blocks of ``frame``, whose bytes were written, as received if their ``checksums`` are right.

        ``resident`` says that they are on the device too.
        """
        self._guarded(lambda f: self._arrived(f, checksums, resident), frame)

    def over(self, error: BatonError | None) -> None:
        """Ends the stream, because its sender closed it or, with ``error``, can't be understood."""
        if error is not None:
            self.stop(error)
        self._stopped = True
        self._depart()
        self._line.end()

    # ---- what the intake says --------------------------------------------------------------------------

    def stop(self, error: BatonError) -> None:
        """Refuses the stream: nothing is written from now on, and the sender gets ``error``."""
        if self._stopped:
            return
        self._stopped = True
        self._leases.refusals[error.label] += 1
        lease = frames.NO_LEASE if self.lease is None else self.lease.lease_id
        self._line.reply(frames.encode(Frame(Kind.ERROR, lease, self.epoch, control.encode_error(error))))
        self._line.end()
        self._depart()

    def committed(self) -> None:
        """Sends the last acknowledgement, because the engine has taken the handoff over."""
        if self._stopped or self._commit_frame is None:
            return
        self._stopped = True
        self.leave()
        self._line.reply(frames.ack(self._commit_frame))
        self._line.end()

    def leave(self) -> None:
        """Leaves the lease, which this stream then writes no more; tells the engine if it was the lease's last
        stream.
        """
        lease = self.lease
        if lease is None or not lease.has(self, self.rank):
            return
        self._report()
        if lease.leave(self, self.rank):
            self._leases.tell(ReceiveClosed(lease.key, self.epoch))

    def _depart(self) -> None:
        """Leaves the lease, and stops the streams that bring other shards of the same blocks, which can't be
        completed.

        A stream that had left before stops nobody: another may have been opened in its place since.
        """
        if self.lease is None or not self.lease.has(self, self.rank):
            return
        self.leave()
        if self.lease.committing:
            return
        for other in self.lease.open_streams:
            if other.epoch == self.epoch:
                other.stop(HandoffRefused("the stream of another shard of these blocks has ended", "shard_rank"))

    # ---- frames ----------------------------------------------------------------------------------------

    def _guarded(self, act: Callable[[Frame], None], frame: Frame) -> None:
        """Calls ``act`` with ``frame`` unless the stream has stopped; stops the stream if that raises a
        BatonError.
        """
        if self._stopped:
            return
        try:
            act(frame)
        except BatonError as error:
            self.stop(error)

    def _control(self, frame: Frame) -> None:
        if frame.kind is Kind.OPEN:
            self._open(frame, self._find(frame))
        elif frame.kind is Kind.COMMIT:
            self._commit(frame, self._mine(frame))
        else:
            raise CorruptFrame(f"a sender sends no {frame.kind.name} frame", "kind")

    def _find(self, frame: Frame) -> IntakeLease:
        """Returns the lease that the frame names. Raises the reason if the frame doesn't fit it."""
        lease = self._leases.lease(frame.lease)
        if lease is None:
            raise LeaseUnknown(
                "no such lease here: it ended, or is another worker's; admit the request again", "lease"
            )
        if frame.epoch != lease.epoch:
            raise StaleEpoch(f"the frame is of epoch {frame.epoch}; {lease.epoch} is in force", "epoch")
        if lease.committing:
            raise AlreadyCommitted("the handoff is complete: the request is decoding", "lease")
        if self.lease is not None and (frame.shard_rank, frame.shard_count) != (self.rank, self.shards):
            raise LayoutMismatch(
                f"the frame is for shard {frame.shard_rank} of {frame.shard_count}, its stream for "
                f"{self.rank} of {self.shards}",
                "shard_rank",
            )
        return lease

    def _mine(self, frame: Frame) -> IntakeLease:
        lease = self._find(frame)
        if self.lease is not lease:
            raise HandoffRefused("the frame's lease is not the one this stream was opened for", "lease")
        assert lease.has(self, self.rank), "a stream that was stopped must not act"
        return lease

    def _open(self, frame: Frame, lease: IntakeLease) -> None:
        if self.lease is not None:
            raise HandoffRefused("this stream was already opened", "kind")
        ours, opening = self._leases.layout, control.decode_opening(frame.body)
        layout = ours if opening.extents else shard_of(ours, frame.shard_rank, frame.shard_count)
        require_same(opening.layout, layout)
        self._require_way(opening, frame)
        if opening.fingerprint != self._leases.fingerprint:
            raise LayoutMismatch(
                f"the blocks are of weights {opening.fingerprint[:16]}…, this worker runs "
                f"{self._leases.fingerprint[:16]}…; start both with the same checkpoint",
                "fingerprint",
            )
        if opening.total_blocks != len(lease.hashes):
            raise ForeignBlock(
                f"the sender's prompt has {opening.total_blocks} blocks, the lease {len(lease.hashes)}",
                "total_blocks",
            )
        senders = frame.shard_count if opening.extents else layout.shard_count // ours.shard_count
        own = self._leases.part if opening.receivers else ()
        is_first = lease.join(self, frame.shard_rank, senders, opening.extents, ours.page_bytes, own)
        self.lease, self.epoch, self._layout, self._extents = lease, lease.epoch, layout, opening.extents
        self.rank, self.shards = frame.shard_rank, frame.shard_count
        if is_first:
            self._leases.tell(ReceiveOpened(lease.key, lease.epoch))
        self._line.reply(frames.ack(frame))

    def _require_way(self, opening: control.Opening, frame: Frame) -> None:
        """Raises LayoutMismatch unless pages may come to this host as ``opening`` says: whole or in parts."""
        here = self._leases
        if opening.receivers not in ((0, here.hosts) if here.leads else (here.hosts,)) or (
            opening.receivers and not (here.part and opening.extents)
        ):
            text = (
                f"the sender divides pages among {opening.receivers} hosts, this worker's ranks are on {here.hosts}"
            )
            raise LayoutMismatch(f"{text}; ask the worker again what goes where (Describe)", "receivers")
        if opening.extents:
            self._require_extents(opening.extents, frame, several=not opening.receivers)

    def _require_extents(self, extents: Part, frame: Frame, several: bool) -> None:
        """Raises LayoutMismatch unless pages here may come in parts, and ``extents`` are of one sender's, among
        ``several`` if that is said.
        """
        ours = self._leases.layout
        require_part(extents, ours.page_bytes)
        alone = several and frame.shard_count < 2
        if codec_of(ours) or ours.shard_count > 1 or alone or frame.shard_rank >= frame.shard_count:
            raise LayoutMismatch(
                f"extents of shard {frame.shard_rank} of {frame.shard_count}: several hosts send parts of whole, "
                "uncoded pages",
                "extents",
            )

    def _places(self, frame: Frame) -> list[memoryview]:
        if frame.kind is Kind.PROBE:
            return self._scratch(frame)
        lease, unit = self._mine(frame), part_bytes(self._extents) or wire_bytes(self._layout)
        if frame.unit != unit:
            raise LayoutMismatch(f"a block has {unit} bytes on its way here, the frame's {frame.unit}", "unit")
        for block in frame.blocks:
            self._check(block, lease)
        numbers = [block.index for block in frame.blocks]
        if len(set(numbers)) != len(numbers) or not self._placed.isdisjoint(numbers):
            raise ForeignBlock(f"a block of {numbers[0]}…{numbers[-1]} came twice on one stream", "index")
        self._placed.update(numbers)
        if self._extents:
            return [self._part_place(n, unit, lease) for n in numbers]
        if codec_of(self._layout) or self._layout is not self._leases.layout:
            self._coded.update({n: memoryview(bytearray(unit)) for n in numbers})
            return [self._coded[n] for n in numbers]
        page = self._leases.memory.page
        # what an earlier epoch brought is verified and must stay so: a copy of it lands in scratch memory
        return [page(lease.pages[n]) if n not in lease.received else memoryview(bytearray(unit)) for n in numbers]

    def _part_place(self, number: int, unit: int, lease: IntakeLease) -> memoryview:
        """Returns where the own part of block ``number`` is received: in its page if it lies there in one piece."""
        if lease.needs(number, self.rank):
            if (view := contiguous(self._leases.memory.page(lease.pages[number]), self._extents)) is not None:
                return view
            self._coded[number] = memoryview(bytearray(unit))
            return self._coded[number]
        return memoryview(bytearray(unit))  # it is verified and stays so

    def _check(self, block: Block, lease: IntakeLease) -> None:
        index = block.index
        if not lease.held <= index < len(lease.hashes):
            raise ForeignBlock(f"block {index} is not among {lease.held}…{len(lease.hashes) - 1}", "index")
        if block.hash != lease.hashes[index]:
            raise ForeignBlock(f"block {index} has another hash: it is of other tokens", "hash")

    def _scratch(self, frame: Frame) -> list[memoryview]:
        """Returns memory for the bytes of a preflight probe, which are checked and dropped."""
        if frame.unit * len(frame.blocks) > MAX_PROBE_BYTES:
            raise CorruptFrame(f"a probe has at most {MAX_PROBE_BYTES} bytes", "unit")
        whole = self._leases.scratch(frame.unit * len(frame.blocks))
        return [whole[i * frame.unit : (i + 1) * frame.unit] for i in range(len(frame.blocks))]

    def _arrived(self, frame: Frame, checksums: Sequence[int], resident: bool) -> None:
        frames.check_blocks(frame, checksums)
        if frame.kind is Kind.PROBE:
            self._line.reply(frames.ack(frame))
            return
        lease, numbers = self._mine(frame), [block.index for block in frame.blocks]
        for number in numbers:
            if (coded := self._coded.pop(number, None)) is not None and lease.needs(number, self.rank):
                self._land(coded, self._leases.memory.page(lease.pages[number]))
        whole = lease.arrived(numbers, self.rank)
        self._unacked += numbers
        self._unreported += whole
        if resident:
            self._resident += whole
        self._leases.count(len(whole), len(numbers) * frame.unit)
        if frame.wants_ack or len(self._unacked) >= REPORT_BLOCKS:
            self._report()
            blocks, self._unacked = self._unacked, []
            self._line.reply(frames.ack(frame, blocks))

    def _land(self, coded: memoryview, page: memoryview) -> None:
        ours = self._leases.layout
        if self._extents:
            scatter(coded, page, self._extents)
        elif self._layout is ours:
            land(coded, page, ours)
        else:
            land_part(coded, page, self._layout, ours)

    def _commit(self, frame: Frame, lease: IntakeLease) -> None:
        missing = lease.missing(self.rank)
        if missing:
            raise HandoffRefused(f"{len(missing)} blocks are missing, the first is {missing[0]}", "blocks")
        closing = control.decode_closing(frame.body)
        if not closing.first.token_ids and not closing.first.finish_reason:
            raise HandoffRefused("a commit brings the first token, or the end of an answer without one", "first")
        self._report()
        self._commit_frame = frame
        said = lease.commit(self.rank, closing)
        if said is not None:
            self._leases.tell(Commit(lease.key, self.epoch, said.first, said.cached_tokens))

    def _report(self) -> None:
        if self.lease is not None and self._unreported:
            resident, self._resident = tuple(self._resident), []
            self._leases.tell(BlocksReceived(self.lease.key, self.epoch, tuple(self._unreported), resident))
            self._unreported = []
