"""The client side of simulated gRPC: channels, methods and calls that behave as those of grpc.aio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Generator

import grpc
import grpc.aio

from baton.drill.machines.network import Network, NetworkConnection
from baton.drill.rpc.server import ServerCall
from baton.drill.rpc.stream import (
    CANCELLED,
    EOF,
    UNAVAILABLE,
    Deserialize,
    Message,
    Metadata,
    Serialize,
    Status,
    Stream,
    same,
)
from baton.tls.rpc import Dialer, Options

Ready = grpc.ChannelConnectivity


class Call:
    """The client's end of one RPC."""

    def __init__(self, method: _Method, timeout: float | None, metadata: Metadata = ()) -> None:
        self._metadata, self._timeout = metadata, timeout
        self._method, self._replies = method, Stream()
        self._connection: NetworkConnection | None = None
        self._server: ServerCall | None = None
        self._status: Status | None = None
        self._over = asyncio.Event()
        self._cancelled = False
        self._timer = (
            None
            if timeout is None
            else asyncio.get_running_loop().call_later(max(0.0, timeout), self._fail, _deadline(timeout))
        )
        self._begin()

    def _begin(self) -> None:
        self._connection = self._method.channel.connection()
        if self._connection is None:
            loop, channel = asyncio.get_running_loop(), self._method.channel
            refused = UNAVAILABLE, f"nobody answers at {channel.address}", ()
            loop.call_later(channel.network.conditions.delay_s, self._fail, refused)
            return
        self._connection.when_broken(self._broke, self._connection.client)
        self._server = ServerCall(self, self._connection, self._method.path, self._metadata, self._timeout)
        self._connection.up.send(self._server.begin, 100)

    # ---- what the product calls ----

    async def write(self, message: Message) -> None:
        """Sends a message and waits until the flow-control window has room.

        Raises AioRpcError if the call fails meanwhile, InvalidStateError if it had ended before.
        """
        if self._status is not None:
            raise asyncio.InvalidStateError("the call is over")
        try:
            if self._server is None:  # nobody answers, which the call hears in a moment
                await self._over.wait()
            else:
                self._send(self._method.channel.encoded(message, self._method.serialize))
                await self._server.requests.room()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._status is not None:
            self._raise()

    async def done_writing(self) -> None:
        """Tells the server that no further message follows."""
        if self._status is None and self._connection is not None and self._server is not None:
            self._connection.up.send(self._server.requests.end, 10)

    async def read(self) -> Message:
        """Returns the next reply, or EOF after the last. Raises AioRpcError if the call failed."""
        data = await self._next()
        if data is not None:
            return self._method.channel.decoded(data, self._method.deserialize)
        self._raise()
        return EOF

    def cancel(self) -> bool:
        """Cancels the call at both ends; returns False if it had ended."""
        if self._status is not None:
            return False
        self._cancelled = True
        self._fail((CANCELLED, "Locally cancelled by application!", ()))
        return True

    def cancelled(self) -> bool:
        """Returns whether this end has cancelled the call."""
        return self._cancelled

    def done(self) -> bool:
        """Returns whether the call has ended."""
        return self._status is not None

    async def code(self) -> grpc.StatusCode:
        """Waits for the call's end and returns its status code."""
        await self._over.wait()
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        """Waits for the call's end and returns the text of its status."""
        await self._over.wait()
        assert self._status is not None
        return self._status[1]

    def __await__(self) -> Generator[object, None, Message]:
        return self._whole().__await__()

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._each()

    async def _each(self) -> AsyncIterator[Message]:
        while (message := await self.read()) is not EOF:
            yield message

    async def _next(self, last: bool = False) -> bytes | None:
        """Returns the next reply, or None after the last; with ``last``, waits until the status is known.

        If the awaiting task is cancelled, so is the call, as in grpc.aio.
        """
        try:
            data = await self._replies.next()
            if data is None or last:
                await self._over.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return data

    async def _whole(self) -> Message:
        data = await self._next(last=True)
        self._raise()
        assert data is not None, "a call that succeeded has a reply"
        return self._method.channel.decoded(data, self._method.deserialize)

    # ---- the network's side ----

    def send_request(self, message: Message) -> None:
        """Sends the single request of a unary call."""
        if self._server is not None and self._connection is not None:
            self._send(self._method.channel.encoded(message, self._method.serialize))
            self._connection.up.send(self._server.requests.end, 1)

    def replied(self, data: bytes) -> None:
        """Receives a reply's bytes from the network."""
        if self._status is None:
            self._replies.arrive(data)

    @property
    def replies(self) -> Stream:
        """Returns the stream of replies that the server sends."""
        return self._replies

    def ended(self, status: Status) -> None:
        """Receives the server's status from the network, after the last reply."""
        if self._status is None:
            self._settle(status)

    def _send(self, data: bytes) -> None:
        assert self._server is not None
        assert self._connection is not None
        server = self._server
        server.requests.sending(len(data))
        self._connection.up.send(lambda: server.requests.arrive(data), len(data))

    def _broke(self) -> None:
        self._fail((UNAVAILABLE, "the connection broke", ()))

    def _fail(self, status: Status) -> None:
        """Ends the call with a status that this end made; replies that were not read are lost."""
        if self._status is None:
            self._replies.drop()
            self._settle(status)
            if self._connection is not None and self._server is not None:
                self._connection.up.send(self._server.cancel, 10)

    def _settle(self, status: Status) -> None:
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.forget(self._broke)
        self._replies.end()
        if self._server is not None:
            self._server.requests.open_window()
        self._over.set()

    def _raise(self) -> None:
        assert self._status is not None
        code, details, trailing = self._status
        if self._cancelled:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            metadata = grpc.aio.Metadata(*trailing)
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details, details)


class _Method:
    """A method of a channel; calling it starts an RPC and returns its ``Call``."""

    def __init__(
        self, channel: Channel, path: str, unary: bool, serialize: Serialize | None, deserialize: Deserialize | None
    ) -> None:
        self.channel, self.path, self._unary = channel, path, unary
        self.serialize, self.deserialize = serialize or same, deserialize or same

    def __call__(
        self, request: Message = None, *, timeout: float | None = None, metadata: Metadata = (), **_: object
    ) -> Call:
        call = Call(self, timeout, metadata)
        if self._unary:
            call.send_request(request)
        return call


class Channel:
    """A channel from process ``process`` to ``address``; it connects when needed, with one connection at a time."""

    def __init__(self, network: Network, process: str, address: str) -> None:
        self.network, self.address = network, address
        self._process = process
        self._connection: NetworkConnection | None = None
        self._closed = False
        self._state = Ready.IDLE
        self._changes: deque[asyncio.Event] = deque()

    def unary_unary(
        self,
        path: str,
        request_serializer: Serialize | None = None,
        response_deserializer: Deserialize | None = None,
        **_: object,
    ) -> _Method:
        """Returns a callable for the method ``path``, which sends one message and receives one."""
        return _Method(self, path, True, request_serializer, response_deserializer)

    def unary_stream(
        self,
        path: str,
        request_serializer: Serialize | None = None,
        response_deserializer: Deserialize | None = None,
        **_: object,
    ) -> _Method:
        """Returns a callable for the method ``path``, which sends one message and receives many."""
        return _Method(self, path, True, request_serializer, response_deserializer)

    def stream_stream(
        self,
        path: str,
        request_serializer: Serialize | None = None,
        response_deserializer: Deserialize | None = None,
        **_: object,
    ) -> _Method:
        """Returns a callable for the method ``path``, which sends many messages and receives many."""
        return _Method(self, path, False, request_serializer, response_deserializer)

    def connection(self) -> NetworkConnection | None:
        """Returns the connection for a new call, made if needed; None if the channel is closed or the address
        unreachable.
        """
        if self._closed:
            return None
        if self._connection is None or self._connection.broken:
            self._connection = self.network.connect(self._process, self.address)
            self._become(Ready.TRANSIENT_FAILURE if self._connection is None else Ready.READY)
            if self._connection is not None:
                self._connection.when_broken(lambda: self._become(Ready.IDLE), self._process)
        return self._connection

    def encoded(self, message: Message, serialize: Serialize) -> bytes:
        """Returns ``message`` as bytes; none if the process is short of memory, as grpc.aio sends an empty message
        in place of one that it can't serialize. Bytes are sent as they are.
        """
        fits = serialize is same or self.network.memory.there_is(self._process)
        return serialize(message) if fits else b""

    def decoded(self, data: bytes, deserialize: Deserialize) -> Message:
        """Returns the message of ``data``; None if the process is short of memory, as grpc.aio returns for one that
        it can't deserialize. Bytes are received as they are.
        """
        fits = deserialize is same or self.network.memory.there_is(self._process)
        return deserialize(data) if fits else None

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Returns the channel's connectivity state."""
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        """Waits until the channel's state differs from ``last``."""
        while self._state is last:
            changed = asyncio.Event()
            self._changes.append(changed)
            await changed.wait()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Closes the channel and breaks its connection, which ends every call on it."""
        self._closed = True
        if self._connection is not None:
            self._connection.break_now()
        self._become(Ready.SHUTDOWN)

    def _become(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        while self._changes:
            self._changes.popleft().set()


class SimulatedDialer(Dialer):
    """Makes simulated channels for the process ``process``."""

    def __init__(self, network: Network, process: str) -> None:
        super().__init__(None)
        self._network, self._process = network, process

    def channel(self, address: str, role: str = "worker", options: Options = ()) -> grpc.aio.Channel:
        """Returns a new simulated channel to ``address``; ``role`` and ``options`` have no effect."""
        return Channel(self._network, self._process, address)


def _deadline(timeout: float | None) -> Status:
    return grpc.StatusCode.DEADLINE_EXCEEDED, f"Deadline Exceeded after {timeout} s", ()
