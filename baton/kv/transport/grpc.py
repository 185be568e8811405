"""Carries frames as raw messages, without protobuf, of one gRPC stream per handoff: the most portable transport.

Knows nothing of frames' contents. The method isn't in the .proto service, because its messages are bytes; the
server adds ``handoff_handler(intake.accept)`` beside the generated handlers and is built with ``SERVER_OPTIONS``.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import grpc.aio

from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire.base import Accept, HandoffStream, QueuedReplyStream, Sink, Transport, deliver, message
from baton.kv.wire.frames import WITH_BLOCKS, Frame
from baton.protos.errors import WorkerLost
from baton.protos.rpc import UNACCEPTED, heed_cancel
from baton.tls.identity import Identity
from baton.tls.rpc import PLAIN, Dialer

SERVICE = "baton.v1.DecodeWorker"
METHOD = f"/{SERVICE}/Handoff"
MAX_MESSAGE_BYTES = 512 << 20  # a frame holds at least one page; the largest models' pages are some tens of MiB
IDLE_S = 60.0  # seconds that a channel without a stream is kept for the next one
LINGER_S = 1.0  # seconds that the receiver waits for the sender to close first
MALLOC_OPTIONS = [(-3, 32 << 20), (-1, 128 << 20), (-2, 16 << 20)]  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD

_SIZES = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_SIZES,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_SIZES,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 4096),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    UNACCEPTED,
]

RECEIVED_BYTES = 32 << 20  # bytes of the largest message from a peer, as calls with the longest prompts need


def server_options(page_bytes: int) -> list[tuple[str, int]]:
    """Returns the gRPC server options of a worker whose pages have ``page_bytes`` bytes.

    They limit the message size, because gRPC reads a whole message before its lease can be checked.
    """
    most = max(RECEIVED_BYTES, page_bytes + (8 << 20))
    return [*SERVER_OPTIONS[:1], ("grpc.max_receive_message_length", most), *SERVER_OPTIONS[2:]]


@functools.cache
def keep_freed_buffers() -> None:
    """Makes glibc reuse message buffers instead of mapping new memory for each, in the whole process.

    With frames of 1 MiB throughput is two to three times as high; up to 128 MiB of freed memory stay allocated.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from other C libraries
    if mallopt is not None:
        for option, size in MALLOC_OPTIONS:
            mallopt(option, size)


def sender(memory: PageMemory, identity: Identity | None = None) -> Transport:
    """Returns the transport to any worker; ``memory`` isn't used. With an ``identity`` it is encrypted."""
    return GrpcTransport(Dialer(identity))


def handoff_handler(accept: Accept) -> grpc.GenericRpcHandler:
    """Returns the receiver's RPC handler, for ``server.add_generic_rpc_handlers((…,))``."""
    keep_freed_buffers()

    async def handle(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        line = QueuedReplyStream()
        sink = accept(line)
        reading = asyncio.ensure_future(_read(context, sink, line))
        try:
            while (reply := await line.get()) is not None:
                await context.write(reply)
            if reading.done():
                return reading.result()
            # The client closes once it has read the last reply. Ending first would make its writes fail, and gRPC
            # then throws away replies that it hasn't read: a typed refusal would become a lost connection.
            await asyncio.sleep(LINGER_S)
        finally:
            reading.cancel()
            sink.over(None)

    method = grpc.stream_stream_rpc_method_handler(handle, request_deserializer=None, response_serializer=None)
    return grpc.method_handlers_generic_handler(SERVICE, {"Handoff": method})


async def _read(context: grpc.aio.ServicerContext[bytes, bytes], sink: Sink, line: QueuedReplyStream) -> None:
    """Delivers message by message to ``sink``; at the end, however it comes, ends ``line``."""
    try:
        while (data := await context.read()) is not grpc.aio.EOF:
            if not line.ended:  # else it is drained: a sender that is stuck in a write reads no refusal
                deliver(sink, data)
        sink.over(None)
    finally:
        line.end()


class _Link:
    """One gRPC channel to a worker, and the number of streams on it."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        self.channel = dialer.channel(address, options=CHANNEL_OPTIONS)
        self._stream = self.channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)
        self.streams = 0
        self.broken = False
        self.used = asyncio.get_running_loop().time()  # when its last stream ended, or it was made

    def enter(self) -> grpc.aio.StreamStreamCall:
        """Returns a new RPC for a stream, which is counted until ``leave``."""
        call = self._stream()
        self.streams += 1
        return call

    async def leave(self) -> None:
        """Counts one stream less; a broken channel is closed with its last one."""
        self.streams -= 1
        self.used = asyncio.get_running_loop().time()
        if self.broken and self.streams == 0:
            await self.channel.close()


class GrpcStream:
    """Implements ``HandoffStream`` over one RPC."""

    def __init__(self, link: _Link, address: str) -> None:
        self._link = link
        self._address = address
        self._call = link.enter()
        self._closed = False
        self._writing: asyncio.Future[None] | None = None

    async def send(self, frame: Frame, payload: Sequence[memoryview] = ()) -> None:
        """Sends one message, waiting for HTTP/2 flow control; one with blocks is written in the background until
        the next ``send``. Raises WorkerLost.
        """
        data = message(frame, payload)
        with self._translated():
            if self._writing is not None:
                await self._writing
            self._writing = asyncio.ensure_future(self._call.write(data))
            if frame.kind in WITH_BLOCKS:
                await asyncio.sleep(0)  # it begins
            else:
                await self._writing

    async def receive(self) -> bytes | None:
        """Returns the next encoded frame; None at the stream's orderly end. Raises WorkerLost."""
        with self._translated():
            reply = await self._call.read()
        heed_cancel()
        if reply is None:
            raise self._lost("what it said can't be read")  # as without memory for it
        if reply is not grpc.aio.EOF:
            return bytes(reply)
        if await self._call.code() is not grpc.StatusCode.OK:
            raise self._lost(f"{await self._call.code()}: {await self._call.details()}")
        return None

    async def close(self) -> None:
        """Cancels the RPC, so that both ends release it at once. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._call.cancel()
        try:
            if self._writing is not None:
                await asyncio.gather(self._writing, return_exceptions=True)
        finally:
            await self._link.leave()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raises gRPC's errors as WorkerLost."""
        try:
            yield
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            heed_cancel()
            raise self._lost(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC tells of a closed channel by a cancellation that nobody asked this task for
            raise self._lost("the transport was closed") from None

    def _lost(self, error: Exception | str) -> WorkerLost:
        why: Exception | str = error
        if isinstance(error, grpc.aio.AioRpcError):
            self._link.broken |= error.code() is grpc.StatusCode.UNAVAILABLE
            why = f"{error.code().name}: {error.details()}"
        return WorkerLost(f"the handoff stream to {self._address} broke: {why}", "decode_address")


class GrpcTransport:
    """Implements ``Transport`` by gRPC, with one channel per decode worker, replaced when it breaks.

    A new channel uses the certificate that is valid then. One that no stream has used for IDLE_S is closed, because
    its worker may be gone for good.
    """

    def __init__(self, dialer: Dialer = PLAIN) -> None:
        keep_freed_buffers()
        self._dialer = dialer
        self._links: dict[str, _Link] = {}
        self._purged = 0.0  # when idle channels were last looked for, in the loop's time

    async def connect(self, address: str) -> HandoffStream:
        """Returns a stream by a new RPC to ``address``. A connection that fails raises WorkerLost at the first send
        or receive.
        """
        now = asyncio.get_running_loop().time()
        if now - self._purged > IDLE_S:
            self._purged = now
            await self._purge(now)
        link = self._links.get(address)
        if link is None or link.broken:
            link = self._links[address] = _Link(address, self._dialer)
        return GrpcStream(link, address)

    async def _purge(self, now: float) -> None:
        """Forgets broken channels, and closes those that were not used for IDLE_S."""
        idle = [at for at, link in self._links.items() if not link.streams and now - link.used > IDLE_S]
        closed = [self._links.pop(at) for at in idle]
        self._links = {at: link for at, link in self._links.items() if not link.broken}
        for link in closed:
            await link.channel.close()

    async def close(self) -> None:
        """Closes every channel; the streams on them break."""
        links, self._links = self._links, {}
        for link in links.values():
            await link.channel.close()
