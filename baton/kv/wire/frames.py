"""Encodes and decodes one frame of a handoff stream, little-endian, the same on every transport.

Knows nothing of leases in force, of pages or of how bytes travel. A frame is a header, a body and, for some kinds,
the bytes of blocks:

     0  magic "BKV1"     4  kind u8     5  flags u8     6  shard_rank u16    8  shard_count u16   10  subject u16
    12  epoch u32       16  lease 16 bytes             32  count u32        36  unit u32
    40  sequence u64    48  checksum u64: xxh3-64 of the body    56  checksum u64: xxh3-64 of 0..55    64  body

A frame with blocks (BLOCK, PROBE) has ``count`` of them, each of ``unit`` bytes. Its body is their table

    index u32 · hash 32 bytes · checksum u64 (xxh3-64 of that block's bytes)     count times
    offset u64 in the sender's memory                                            count times, only with ELSEWHERE

and the blocks' bytes follow the body, or are ELSEWHERE. So a receiver that has read and verified a body knows each
block's place before its bytes come, and can receive them there. With TRAILING (version 2 of the frames, which a
sender writes only to a receiver that said it reads it) the table has no checksums. They are the trailer,

    checksum u64 (xxh3-64 of that block's bytes)                                 count times

after the blocks' bytes, so that a sender can hash bytes while they are being sent.

Any other frame has count 0 and a body of ``unit`` bytes: protobuf in OPEN, COMMIT and ERROR (control.py). ACK names
in ``subject`` the kind it acknowledges, and carries block indices as u32 if that is BLOCK. END ends the stream.
GREETING is a receiver's first frame to a sender that asked for it (sending.py): ``subject`` is the version it
reads.

``sequence`` is the number of frames with blocks that the sender had sent before, over all lanes of the stream. In a
frame with blocks ``subject`` is the number of frames without blocks before it; senders of version 1 send 0. By
these two numbers a receiver recognizes a frame that has overtaken others on another lane.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum

import msgspec

from baton.kv.memory.block_sums import Bytes, checksum
from baton.protos.errors import CorruptFrame

MAGIC = b"BKV1"
HEADER_BYTES = 64  # bytes of a frame's header
LEASE_BYTES = 16  # bytes of a lease's random id
HASH_BYTES = 32  # bytes of a block's SHA-256
NO_LEASE = bytes(LEASE_BYTES)
NO_HASH = bytes(HASH_BYTES)
ACK_NOW = 1  # flag: the sender waits for the acknowledgement of this frame and of those before it
ELSEWHERE = 2  # flag: the blocks' bytes are in the sender's memory, at the offsets in the body
TRAILING = 4  # flag: the blocks' checksums follow their bytes
RESIDENT = 128  # flag between a handoff and its stream, never on the wire: the device's pages also hold the blocks
NEWEST = 2  # the newest version of the frames that this build reads and writes
TRAILING_SINCE = 2  # the version that brought TRAILING and GREETING
MAX_BLOCKS = 1024  # blocks of one frame, because one scatter read of Linux takes as many buffers
MAX_BODY_BYTES = 1 << 20  # bytes of a frame's body, so that a wrong header can't ask for gigabytes
MOST_COUNTED = 0xFFFF  # the largest count of frames without blocks, because it goes into a u16
PIECE_BYTES = 256 << 10  # bytes read and hashed at a time, few enough to stay in the CPU's cache

_HEADER = struct.Struct("<4sBBHHHI16sIIQQ")
_CHECKSUM = struct.Struct("<Q")
_ENTRY = struct.Struct("<I32sQ")
_BARE_ENTRY = struct.Struct("<I32s")  # with TRAILING


class Kind(IntEnum):
    """Names the kinds of frames."""

    OPEN = 1  # first of a handoff: who sends what
    BLOCK = 2  # KV blocks
    COMMIT = 3  # last of a handoff, with the first token
    ACK = 4  # acknowledges a frame
    ERROR = 5  # the receiver refuses the handoff
    PROBE = 6  # blocks that are received and dropped, to measure a transport
    END = 7  # orderly end of a stream
    GREETING = 8  # the version of the frames that the receiver reads


KINDS = frozenset(int(kind) for kind in Kind)
WITH_BLOCKS = frozenset((int(Kind.BLOCK), int(Kind.PROBE)))


class Block(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a frame's table of blocks.

    ``checksum`` is the xxh3-64 of the block's bytes as sent; None if the transport is to compute it (base.py), or
    if it will follow the blocks' bytes.
    """

    index: int  # of the block in its prompt
    hash: bytes  # the 32-byte block hash
    checksum: int | None = None


class Frame(msgspec.Struct, frozen=True):
    """A decoded frame, without the blocks' bytes. ``body`` is a view of the bytes that it was decoded from.

    The module docstring describes the header's fields.
    """

    kind: Kind
    lease: bytes = NO_LEASE
    epoch: int = 0
    body: Bytes = b""
    shard_rank: int = 0
    shard_count: int = 1
    flags: int = 0
    subject: int = 0
    sequence: int = 0
    unit: int = 0  # bytes of each block
    blocks: tuple[Block, ...] = ()
    offsets: tuple[int, ...] = ()  # bytes from the begin of the sender's memory, of each block

    @property
    def wants_ack(self) -> bool:
        """Returns whether the sender waits for an acknowledgement."""
        return bool(self.flags & ACK_NOW)

    @property
    def elsewhere(self) -> bool:
        """Returns whether the blocks' bytes lie in the sender's memory instead of following the frame."""
        return bool(self.flags & ELSEWHERE)

    @property
    def trailing(self) -> bool:
        """Returns whether the blocks' checksums follow their bytes."""
        return bool(self.flags & TRAILING) and self.kind in WITH_BLOCKS

    @property
    def resident(self) -> bool:
        """Returns whether the device's pages hold the blocks, at the same offsets as the host's pages."""
        return bool(self.flags & RESIDENT) and len(self.offsets) == len(self.blocks)

    @property
    def sealed(self) -> bool:
        """Returns whether every block has its checksum."""
        return all(block.checksum is not None for block in self.blocks)

    def seal(self, checksums: Sequence[int]) -> Frame:
        """Returns the frame with ``checksums`` for its blocks, in order."""
        table = [Block(block.index, block.hash, said) for block, said in zip(self.blocks, checksums, strict=True)]
        return msgspec.structs.replace(self, blocks=tuple(table))


def encode(frame: Frame) -> bytes:
    """Returns the header and body of ``frame``; the blocks' bytes, unless they are ELSEWHERE, have to follow."""
    count, unit, body = len(frame.blocks), frame.unit, frame.body
    if frame.kind in WITH_BLOCKS:
        body = _table(frame)
        if frame.elsewhere:
            body += struct.pack(f"<{count}Q", *frame.offsets)
    else:
        unit = len(body)
    head = _HEADER.pack(
        MAGIC,
        frame.kind,
        frame.flags,
        frame.shard_rank,
        frame.shard_count,
        frame.subject,
        frame.epoch,
        frame.lease,
        count,
        unit,
        frame.sequence,
        checksum(body),
    )
    return b"".join((head, _CHECKSUM.pack(checksum(head)), body))


def body_bytes(header: Bytes) -> int:
    """Returns the size in bytes of the body after ``header``. Raises CorruptFrame if the header is damaged or
    exceeds the protocol's limits.
    """
    magic, kind, flags, *_, count, unit, _sequence, _sum = _HEADER.unpack_from(header)
    if magic != MAGIC or kind not in KINDS:
        raise CorruptFrame(f"not a frame of this protocol: magic {bytes(magic)!r}, kind {kind}", "frame")
    if checksum(memoryview(header)[: _HEADER.size]) != _CHECKSUM.unpack_from(header, _HEADER.size)[0]:
        raise _damaged("header")
    size = count * (_entry(flags).size + 8 * bool(flags & ELSEWHERE)) if kind in WITH_BLOCKS else unit
    if count > MAX_BLOCKS or size > MAX_BODY_BYTES:
        raise CorruptFrame(f"a frame of {count} blocks and a body of {size} bytes is beyond the protocol", "frame")
    return int(size)


def decode(data: Bytes) -> Frame:
    """Returns the frame whose header and body are exactly ``data``. Raises CorruptFrame if they are damaged or of
    another size.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise CorruptFrame(f"a frame of {len(view)} bytes is shorter than its header of {HEADER_BYTES}", "frame")
    if body_bytes(view) != len(view) - HEADER_BYTES:
        raise CorruptFrame("the frame is not as long as its header says", "frame")
    body = view[HEADER_BYTES:]
    _, kind, flags, rank, shards, subject, epoch, lease, count, unit, sequence, said = _HEADER.unpack_from(view)
    if checksum(body) != said:
        raise _damaged("body")
    if kind not in WITH_BLOCKS:
        return Frame(Kind(kind), lease, epoch, body, rank, shards, flags, subject, sequence)
    if flags & TRAILING and flags & ELSEWHERE:
        raise CorruptFrame("no checksums can follow bytes that lie elsewhere", "flags")
    table = body[: count * _entry(flags).size]
    blocks = tuple([Block(*entry) for entry in _entry(flags).iter_unpack(table)])
    offsets = struct.unpack_from(f"<{count}Q", body, len(table)) if flags & ELSEWHERE else ()
    return Frame(Kind(kind), lease, epoch, b"", rank, shards, flags, subject, sequence, unit, blocks, offsets)


def trailer(checksums: Sequence[int]) -> bytes:
    """Returns the bytes that follow the blocks of a TRAILING frame: ``checksums`` as u64."""
    return struct.pack(f"<{len(checksums)}Q", *checksums)


def trailer_bytes(frame: Frame) -> int:
    """Returns the size in bytes of the trailer after the blocks of ``frame``; 0 for a frame without one."""
    return _CHECKSUM.size * len(frame.blocks) if frame.trailing else 0


def with_trailer(frame: Frame, data: Bytes) -> Frame:
    """Returns TRAILING frame ``frame`` with the checksums from its trailer ``data``."""
    return frame.seal(struct.unpack(f"<{len(frame.blocks)}Q", data))


def message(frame: Frame, payload: Sequence[Bytes] = ()) -> bytes:
    """Returns header, body and blocks' bytes in one piece, copying each byte once. The blocks must have their
    checksums.
    """
    return b"".join((encode(frame), *payload))


def split(data: Bytes) -> tuple[Frame, list[memoryview]]:
    """Returns the frame of a message and views of its blocks' bytes, whose checksums are not verified. Raises
    CorruptFrame.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise CorruptFrame(f"a frame of {len(view)} bytes is shorter than its header of {HEADER_BYTES}", "frame")
    end = HEADER_BYTES + body_bytes(view)
    frame = decode(view[:end])
    if frame.trailing:
        raise CorruptFrame("a message in one piece has its checksums in its header", "flags")
    unit, count = frame.unit, 0 if frame.elsewhere else len(frame.blocks)
    if len(view) - end != count * unit:
        raise CorruptFrame(f"{count} blocks of {unit} bytes were announced, {len(view) - end} bytes came", "frame")
    return frame, [view[end + i * unit : end + (i + 1) * unit] for i in range(count)]


def check_blocks(frame: Frame, checksums: Sequence[int]) -> None:
    """Raises CorruptFrame unless ``checksums``, computed from the received bytes, equal those of the sender."""
    for block, got in zip(frame.blocks, checksums, strict=True):
        if block.checksum != got:
            raise CorruptFrame(f"block {block.index} was damaged on the way: its checksum differs", "checksum")


def _entry(flags: int) -> struct.Struct:
    return _BARE_ENTRY if flags & TRAILING else _ENTRY


def _table(frame: Frame) -> bytes:
    if frame.trailing:
        return b"".join([_BARE_ENTRY.pack(block.index, block.hash) for block in frame.blocks])
    return b"".join([_ENTRY.pack(block.index, block.hash, block.checksum) for block in frame.blocks])


def ack(of: Frame, blocks: Iterable[int] = ()) -> bytes:
    """Returns the encoded acknowledgement of frame ``of``; if that is a BLOCK frame, of the block indices
    ``blocks``.
    """
    indices = tuple(blocks)
    return encode(
        Frame(
            Kind.ACK,
            of.lease,
            of.epoch,
            struct.pack(f"<{len(indices)}I", *indices),
            of.shard_rank,
            of.shard_count,
            subject=of.kind,
        )
    )


def acked_blocks(frame: Frame) -> tuple[int, ...]:
    """Returns the block indices in ``frame``, an ACK of BLOCK frames. Raises CorruptFrame."""
    if len(frame.body) % 4:
        raise CorruptFrame("an ACK's body must be u32 block indices", "body")
    return struct.unpack(f"<{len(frame.body) // 4}I", frame.body)


def _damaged(part: str) -> CorruptFrame:
    text = f"the checksum of the frame's {part} doesn't match its bytes: damaged on the way; send it again"
    return CorruptFrame(text, "checksum")
