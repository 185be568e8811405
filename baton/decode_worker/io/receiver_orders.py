"""Defines what a decode worker's I/O process and the KV receivers of its ranks' other hosts tell one another.

Knows nothing of connections. One stream of gRPC per host lasts as long as the worker has its role. The lead's
process says which leases may be filled; the host answers each order with OrderDone once it acts by it, and reports
what its streams do by the messages that an intake has for the engine.
"""

from __future__ import annotations

import msgspec

from baton.kv.layout.extents import Part
from baton.protos.channel import BlocksReceived, Commit, ReceiveClosed, ReceiveOpened
from baton.protos.errors import ErrorInfo
from baton.protos.nouns import WorkerInfo

SERVICE = "baton.v1.RankReceiver"
METHOD = f"/{SERVICE}/Receive"


class BeginReceiving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begins: ``info`` describes the worker, ``part`` is what of each page goes to this one of its ``hosts``.
    ``token`` proves that the worker's lead says so.
    """

    token: bytes
    info: WorkerInfo
    part: Part
    hosts: int


class TakeLease(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Has a lease filled, as ``IntakeLease`` of the lead's host has it."""

    key: int
    lease: bytes
    epoch: int
    pages: tuple[int, ...]
    hashes: tuple[bytes, ...]
    held: int
    unseen: tuple[int, int]


class RearmLease(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begins another epoch of a lease, of which the blocks ``complete`` have come to all hosts."""

    key: int
    epoch: int
    complete: tuple[int, ...]


class StopStreams(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ends the streams of one epoch of a lease, because those to another host have ended."""

    key: int
    epoch: int


class CloseLease(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ends a lease; once this is done nothing is written for it any more."""

    key: int
    error: ErrorInfo | None = None


class LeaseCommitted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Says that the engine has taken a handoff over, so that its streams get their last acknowledgement."""

    key: int
    epoch: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for an OrderDone alone, as a sign of life."""


class Receiving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers BeginReceiving: the host takes streams."""


class OrderDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers every other order, in their order."""


class StreamsRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reports how many of the host's streams were refused since the last such report, by the error's label."""

    counts: dict[str, int]


class NotReceiving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers why the host obeys no orders."""

    error: ErrorInfo


Order = BeginReceiving | TakeLease | RearmLease | StopStreams | CloseLease | LeaseCommitted | Ping
Report = (
    Receiving | OrderDone | NotReceiving | StreamsRefused | ReceiveOpened | BlocksReceived | Commit | ReceiveClosed
)
ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
encode = msgspec.msgpack.encode
