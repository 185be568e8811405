"""Receives KV into the pages of a host that has ranks of a decode worker, but not its lead.

Knows nothing of ranks or steps. It runs in the process that sends KV from there as well (``rank_sender.py``). The
worker's I/O process, on the lead's host, says which leases may be filled (``receiver_orders.py``); senders connect
here for the part of every page that this host's ranks read. Streams end with the lead's connection.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc
import grpc.aio
import msgspec

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.decode_worker.io.receiver_orders import (
    ORDERS,
    SERVICE,
    BeginReceiving,
    CloseLease,
    LeaseCommitted,
    NotReceiving,
    Order,
    OrderDone,
    Ping,
    RearmLease,
    Receiving,
    Report,
    StopStreams,
    StreamsRefused,
    TakeLease,
    encode,
)
from baton.kv.layout.extents import require_part
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import control, frames
from baton.kv.wire.base import Accept, ReplyStream, Sink
from baton.kv.wire.frames import Frame, Kind
from baton.protos import convert
from baton.protos.channel import ToEngine
from baton.protos.errors import (
    BatonError,
    Forbidden,
    HandoffRefused,
    InvalidRequest,
    LeaseUnknown,
    from_info,
    to_info,
)
from baton.protos.nouns import WorkerInfo
from baton.protos.rpc import abort
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.protos.version import product_version

log = logging.getLogger("baton.kv")

BEGIN_S = 10.0  # seconds that whoever opens a stream has to say for which worker

AnyOrder = TypeVar("AnyOrder")
Mapped = Callable[[int, int], PageMemory]
"""Returns the host's pages, given their number and their bytes. Raises ConfigError if they are others."""


class RankReceiver(stubs.WorkerServicer):
    """Receives parts of pages for whoever has ``token``. ``pages`` maps the host's pages; ``listen`` opens its TCP
    port for streams, and returns the address.
    """

    def __init__(self, token: bytes, pages: Mapped, listen: Callable[[Accept], str]) -> None:
        self._token, self._pages, self._listen = token, pages, listen
        self._intake: Intake | None = None
        self._leases: set[int] = set()
        self._info: WorkerInfo | None = None
        self._data: str = ""

    def handlers(self) -> grpc.GenericRpcHandler:
        """Returns the gRPC handlers of the lead's orders."""
        return grpc.method_handlers_generic_handler(
            SERVICE, {"Receive": grpc.stream_stream_rpc_method_handler(self.receive)}
        )

    async def Describe(self, request: w.DescribeRequest, context: grpc.aio.ServicerContext) -> w.WorkerInfo:
        """Answers with the worker's description, and where this host takes streams."""
        if self._info is None:
            await abort(context, HandoffRefused("this host receives no KV: its lead is no decode worker", "lease"))
        assert self._info is not None
        own = msgspec.structs.replace(self._info, data_addresses={"tcp": self._data}, host_id="")
        return convert.info_to_pb(own)

    def held(self) -> int:
        """Returns how many leases and open streams there are."""
        return 0 if self._intake is None else len(self._leases) + self._intake.open_streams

    def accept(self, line: ReplyStream) -> Sink:
        """Returns the handler of the frames of a transport's new stream."""
        return _Refusing(line) if self._intake is None else self._intake.accept(line)

    async def receive(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Obeys the lead's orders in ``requests`` until it goes, and yields what becomes of them."""
        reports: asyncio.Queue[Report | ToEngine | None] = asyncio.Queue()
        try:
            intake = await self._begin(requests, reports.put_nowait)
        except BatonError as error:
            yield encode(NotReceiving(to_info(error)))
            return
        obeying = asyncio.ensure_future(self._obey(intake, requests, reports.put_nowait))
        try:
            while (said := await reports.get()) is not None:
                yield encode(said)
        finally:
            obeying.cancel()
            if self._intake is intake:
                self._end()

    async def _begin(
        self, requests: AsyncIterator[bytes], report: Callable[[Report | ToEngine | None], None]
    ) -> Intake:
        """Takes the first order, and returns what receives by the following ones. Raises Forbidden unless it comes
        in time, from the lead.
        """
        try:
            async with asyncio.timeout(BEGIN_S):
                said = understood(ORDERS, await anext(aiter(requests)))
        except (TimeoutError, StopAsyncIteration):
            said = Ping()
        if not isinstance(said, BeginReceiving) or not hmac.compare_digest(said.token, self._token):
            raise Forbidden("only the lead of this host's ranks may have KV received here")
        layout = said.info.layout
        require_part(said.part, layout.page_bytes)
        memory = self._pages(said.info.pages, layout.page_bytes)
        self._end()
        self._intake = Intake(memory, layout, said.info.fingerprint, report, said.part, said.hosts, leads=False)
        if not self._data:
            self._data = self._listen(self.accept)
        self._info = said.info
        report(Receiving())
        return self._intake

    def _end(self) -> None:
        """Ends all streams, because the lead has gone or another role's has come."""
        intake, self._intake, self._info = self._intake, None, None
        for key in self._leases if intake is not None else ():
            assert intake is not None
            intake.close(key, LeaseUnknown("the worker's lead is gone, or has another role", "lease"))
        self._leases = set()

    async def _obey(
        self, intake: Intake, requests: AsyncIterator[bytes], report: Callable[[Report | ToEngine | None], None]
    ) -> None:
        told = Counter[str]()  # refusals
        try:
            async for said in requests:
                if self._intake is not intake:
                    return  # another connection of the lead's has taken over
                self._do(intake, understood(ORDERS, said))
                if counts := dict(intake.refusals - told):
                    report(StreamsRefused(counts))
                    told += Counter(counts)
                report(OrderDone())
        except BatonError as error:
            log.error("an order of this host's lead is wrong: %s", error.message)
        finally:
            report(None)

    def _do(self, intake: Intake, order: Order) -> None:
        match order:
            case TakeLease():
                at = order.pages, order.hashes, order.held, order.unseen
                intake.register(IntakeLease(order.key, order.lease, order.epoch, *at))
                self._leases.add(order.key)
            case RearmLease():
                self._rearm(intake, order)
            case StopStreams():
                error = HandoffRefused(
                    "the streams to another host of this worker's ranks have ended", "shard_rank"
                )
                intake.stop(order.key, order.epoch, error)
            case CloseLease():
                intake.close(order.key, None if order.error is None else from_info(order.error))
                self._leases.discard(order.key)
            case LeaseCommitted():
                intake.on_committed(order.key, order.epoch)
            case BeginReceiving() | Ping():
                pass

    def _rearm(self, intake: Intake, order: RearmLease) -> None:
        lease = intake.known(order.key)
        if lease is not None:
            lease.committing = False
            lease.completed(order.complete)
            intake.rearm(order.key, order.epoch)


class _Refusing:
    """Refuses a stream of frames, because no lead has said what may be received."""

    def __init__(self, line: ReplyStream) -> None:
        error = LeaseUnknown("no such lease here; admit the request again", "lease")
        line.reply(frames.encode(Frame(Kind.ERROR, body=control.encode_error(error))))
        line.end()

    def take(self, frame: Frame) -> None:
        """Drops the frame, because the stream was refused."""

    def place(self, frame: Frame) -> None:
        """Returns None, because nothing of a refused stream is written."""

    def landed(self, frame: Frame, checksums: object, resident: bool = False) -> None:
        """Does nothing, because no block of a refused stream counts."""

    def over(self, error: BatonError | None) -> None:
        """Has nothing to end."""


def understood(decoder: msgspec.msgpack.Decoder[AnyOrder], said: bytes) -> AnyOrder:
    """Returns a lead's order. Raises InvalidRequest for one that only another version of Baton understands."""
    try:
        return decoder.decode(said)
    except msgspec.MsgspecError as error:
        text = f"baton {product_version()} on a host of a worker's ranks doesn't understand its lead ({error})"
        raise InvalidRequest(f"{text}; install the same version of Baton on all hosts of a worker") from None
