"""One frame of a handoff stream: an 80-byte header and a payload, little-endian, the same on every transport.

Knows nothing of leases in force, of pages or of how bytes travel.

     0  magic "BKV1"      4  kind u8        5  flags u8          6  shard_rank u16    8  shard_count u16
    10  subject u16      12  epoch u32     16  lease 16 bytes   32  index u32        36  payload bytes u32
    40  hash 32 bytes    72  checksum u64: xxh3-64 of header bytes 0..71, then of the payload        80  payload

OPEN and COMMIT carry protobuf, BLOCK one page, ERROR a WireError (see control.py). ACK names in ``subject`` the
kind it acknowledges, and carries the block indices as u32 when that is BLOCK.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum

import msgspec
import xxhash

from baton.protos.errors import CorruptFrame

MAGIC = b"BKV1"
HEADER_BYTES = 80
LEASE_BYTES = 16
HASH_BYTES = 32
NO_LEASE = bytes(LEASE_BYTES)
NO_HASH = bytes(HASH_BYTES)
ACK_NOW = 1  # flag: the sender waits for this frame's acknowledgement, and those before it

_HEADER = struct.Struct("<4sBBHHHI16sII32s")
_CHECKSUM = struct.Struct("<Q")


class Kind(IntEnum):
    """What a frame is."""

    OPEN = 1
    BLOCK = 2
    COMMIT = 3
    ACK = 4
    ERROR = 5


class Frame(msgspec.Struct, frozen=True):
    """A frame, decoded. ``payload`` borrows the bytes it was decoded from."""

    kind: Kind
    lease: bytes = NO_LEASE
    epoch: int = 0
    index: int = 0
    hash: bytes = NO_HASH
    shard_rank: int = 0
    shard_count: int = 1
    flags: int = 0
    subject: int = 0
    payload: bytes | memoryview = b""

    @property
    def wants_ack(self) -> bool:
        """Whether the sender waits for an acknowledgement."""
        return bool(self.flags & ACK_NOW)


def checksum(head: bytes | memoryview, payload: bytes | memoryview) -> int:
    """xxh3-64 over header (without the checksum) and payload."""
    digest = xxhash.xxh3_64(head)
    digest.update(payload)
    return digest.intdigest()


def encode(frame: Frame) -> bytes:
    """``frame`` as bytes; the payload is copied once."""
    head = _HEADER.pack(
        MAGIC,
        frame.kind,
        frame.flags,
        frame.shard_rank,
        frame.shard_count,
        frame.subject,
        frame.epoch,
        frame.lease,
        frame.index,
        len(frame.payload),
        frame.hash,
    )
    return b"".join((head, _CHECKSUM.pack(checksum(head, frame.payload)), frame.payload))


def decode(data: bytes | memoryview) -> Frame:
    """The frame in ``data``, its payload not copied. Raises CorruptFrame if any bit is not as it was sent."""
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise CorruptFrame(f"a frame of {len(view)} bytes is shorter than its header of {HEADER_BYTES}", "frame")
    (said,) = _CHECKSUM.unpack_from(view, _HEADER.size)
    payload = view[HEADER_BYTES:]
    if checksum(view[: _HEADER.size], payload) != said:
        raise CorruptFrame(
            "the frame's checksum doesn't match its bytes: damaged on the way; send it again", "checksum"
        )
    magic, kind, flags, rank, count, subject, epoch, lease, index, length, block = _HEADER.unpack_from(view)
    if magic != MAGIC or length != len(payload) or kind not in Kind._value2member_map_:
        raise CorruptFrame(f"not a frame of this protocol: magic {magic!r}, kind {kind}, {length} bytes", "frame")
    return Frame(Kind(kind), lease, epoch, index, block, rank, count, flags, subject, payload)


def ack(of: Frame, blocks: Iterable[int] = ()) -> bytes:
    """The acknowledgement of ``of``, or of the BLOCK frames numbered ``blocks``."""
    indices = tuple(blocks)
    return encode(
        Frame(
            Kind.ACK,
            of.lease,
            of.epoch,
            of.index,
            shard_rank=of.shard_rank,
            shard_count=of.shard_count,
            subject=of.kind,
            payload=struct.pack(f"<{len(indices)}I", *indices),
        )
    )


def acked_blocks(frame: Frame) -> tuple[int, ...]:
    """The block indices that an ACK of BLOCK frames names."""
    if len(frame.payload) % 4:
        raise CorruptFrame("an ACK's payload must be u32 block indices", "payload")
    return struct.unpack(f"<{len(frame.payload) // 4}I", frame.payload)
