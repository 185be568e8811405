"""Defines what a prefill worker's I/O process and the KV senders of its ranks' other hosts tell one another.

Knows nothing of connections. One stream of gRPC per handoff carries HostBegin, then blocks, then how it ends; one
answer comes, after which the sender reads no page of the handoff any more. Before the first handoff to a receiver,
a call of its own asks whether the host can reach it.
"""

from __future__ import annotations

import msgspec

from baton.kv.layout.extents import Part
from baton.kv.wire.control import Closing
from baton.prefill_worker.io.handoff import HandoffReport
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.protos.channel import ShipBlock
from baton.protos.errors import ErrorInfo

SERVICE = "baton.v1.RankSender"
METHOD = f"/{SERVICE}/Send"
REACH_METHOD = f"/{SERVICE}/Reach"


class HostBegin(msgspec.Struct, frozen=True, tag=True):
    """Begins a handoff: what is sent where. ``token`` proves that the worker's lead says so; ``pages`` and
    ``page_bytes`` are of the worker's pool.
    """

    token: bytes
    sender: Sender
    to: Destination
    pages: int
    page_bytes: int
    part: Part  # of each page
    shard: tuple[int, int]  # this host's number among those that send, and their count
    kv_transport: str
    incarnation: str = ""  # of the decode worker; empty if unknown
    receivers: int = 0  # hosts of the decode worker's ranks that get a part each; 0: one gets everything


class HostReach(msgspec.Struct, frozen=True, tag=True):
    """Asks whether the host can ship KV to process ``incarnation`` of the receiver at ``address``; the other fields
    are as in HostBegin.
    """

    token: bytes
    address: str
    incarnation: str
    pages: int
    page_bytes: int
    kv_transport: str


class HostReached(msgspec.Struct, frozen=True, tag=True):
    """Answers HostReach: ``problem`` says why it can't, and is empty if it can."""

    problem: str = ""


class HostShip(msgspec.Struct, frozen=True, tag=True):
    """Says that these blocks are finished on every host."""

    blocks: tuple[ShipBlock, ...]


class HostCommit(msgspec.Struct, frozen=True, tag=True):
    """Ends the handoff after the last block."""

    closing: Closing


class HostStop(msgspec.Struct, frozen=True, tag=True):
    """Ends the handoff at once, without a commit."""


class HostSent(msgspec.Struct, frozen=True, tag=True):
    """Answers that the decode worker has taken everything over."""

    report: HandoffReport


class HostNotSent(msgspec.Struct, frozen=True, tag=True):
    """Answers why the handoff has ended without that."""

    error: ErrorInfo


Order = HostBegin | HostShip | HostCommit | HostStop
Answer = HostSent | HostNotSent
ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
REACH: msgspec.msgpack.Decoder[HostReach] = msgspec.msgpack.Decoder(HostReach)
REACHED: msgspec.msgpack.Decoder[HostReached] = msgspec.msgpack.Decoder(HostReached)
encode = msgspec.msgpack.encode
