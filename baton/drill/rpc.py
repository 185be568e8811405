"""gRPC in memory: channels and servers that carry serialized messages over a simulated network.

What the product calls on a ``grpc.aio`` channel, server, call and context is here, with the meaning that it has
there: statuses, trailing metadata, deadlines, cancellation at both ends, flow control per call. Knows nothing of
services.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any

import grpc
import grpc.aio

from baton.drill.network import Connection, Network
from baton.tls.rpc import Dialer

WINDOW_BYTES = 64 << 10  # bytes of one call and direction that may wait unread, as in HTTP/2
EOF = grpc.aio.EOF
Metadata = Sequence[tuple[str, str | bytes]]
UNAVAILABLE, CANCELLED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED
Ready = grpc.ChannelConnectivity


class Stream:
    """Messages of one direction of a call, as their reader sees them."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._unread = 0
        self._ended = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def sending(self, size: int) -> None:
        """Counts bytes as sent and not yet read."""
        self._unread += size
        if self._unread > WINDOW_BYTES:
            self._room.clear()

    def arrive(self, data: bytes) -> None:
        """Takes a message from the network."""
        self._waiting.append(data)
        self._news.set()

    def end(self) -> None:
        """Nothing follows."""
        self._ended = True
        self._news.set()
        self._room.set()

    async def room(self) -> None:
        """Returns when the window has room."""
        await self._room.wait()

    async def next(self) -> bytes | None:
        """Returns the next message, or None after the last."""
        while not self._waiting and not self._ended:
            self._news.clear()
            await self._news.wait()
        if not self._waiting:
            return None
        data = self._waiting.popleft()
        self._unread -= len(data)
        if self._unread <= WINDOW_BYTES:
            self._room.set()
        return data


class Call:
    """The client's end of one RPC."""

    def __init__(self, method: _Method, timeout: float | None) -> None:
        self._method, self._replies = method, Stream()
        self._connection: Connection | None = None
        self._server: ServerCall | None = None
        self._status: tuple[grpc.StatusCode, str, Metadata] | None = None
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
        self._connection.when_broken(lambda: self._fail((UNAVAILABLE, "the connection broke", ())))
        self._server = ServerCall(self, self._connection, self._method.path)
        self._connection.up.send(self._server.begin, 100)

    # ---- what the product calls ----

    async def write(self, message: Any) -> None:
        """Sends a message once the window has room. Raises AioRpcError after the call's end."""
        self._require_open()
        assert self._server is not None
        self._send(self._method.serialize(message))
        await asyncio.sleep(0)
        room = asyncio.ensure_future(self._server.requests.room())
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({room, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            room.cancel()
            over.cancel()
        self._require_open()

    async def done_writing(self) -> None:
        """Tells the server that no message follows."""
        if self._status is None and self._connection is not None and self._server is not None:
            self._connection.up.send(self._server.requests.end, 10)

    async def read(self) -> Any:
        """Returns the next message, or EOF after the last. Raises AioRpcError where the call failed."""
        data = await self._replies.next()
        if data is not None:
            return self._method.deserialize(data)
        await self._over.wait()
        self._raise()
        return EOF

    def cancel(self) -> bool:
        """Ends the call at both ends."""
        if self._status is not None:
            return False
        self._cancelled = True
        self._fail((CANCELLED, "Locally cancelled by application!", ()))
        return True

    def cancelled(self) -> bool:
        """Returns whether this end cancelled the call."""
        return self._cancelled

    def done(self) -> bool:
        """Returns whether the call has ended."""
        return self._status is not None

    async def code(self) -> grpc.StatusCode:
        """Returns the status, once there is one."""
        await self._over.wait()
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        """Returns the status's text, once there is one."""
        await self._over.wait()
        assert self._status is not None
        return self._status[1]

    def __await__(self) -> Generator[Any, None, Any]:
        return self._whole().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._each()

    async def _each(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    async def _whole(self) -> Any:
        try:
            data = await self._replies.next()
            await self._over.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise()
        assert data is not None, "a call that succeeded has a reply"
        return self._method.deserialize(data)

    # ---- the network's side ----

    def send_request(self, message: Any) -> None:
        """Sends the one request of a unary call."""
        if self._server is not None and self._connection is not None:
            self._send(self._method.serialize(message))
            self._connection.up.send(self._server.requests.end, 1)

    def replied(self, data: bytes) -> None:
        """Takes a reply from the network."""
        if self._status is None:
            self._replies.arrive(data)

    @property
    def replies(self) -> Stream:
        """What the server sends."""
        return self._replies

    def ended(self, status: tuple[grpc.StatusCode, str, Metadata]) -> None:
        """Takes the status from the network, after the last reply."""
        if self._status is None:
            self._settle(status)

    def _send(self, data: bytes) -> None:
        assert self._server is not None
        assert self._connection is not None
        server = self._server
        server.requests.sending(len(data))
        self._connection.up.send(lambda: server.requests.arrive(data), len(data))

    def _fail(self, status: tuple[grpc.StatusCode, str, Metadata]) -> None:
        if self._status is None:
            self._settle(status)
            if self._connection is not None and self._server is not None:
                self._connection.up.send(self._server.cancel, 10)

    def _settle(self, status: tuple[grpc.StatusCode, str, Metadata]) -> None:
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        self._replies.end()
        self._over.set()

    def _require_open(self) -> None:
        if self._status is not None:
            self._raise()
            raise asyncio.InvalidStateError("the call is over")

    def _raise(self) -> None:
        assert self._status is not None
        code, details, trailing = self._status
        if self._cancelled:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            metadata = grpc.aio.Metadata(*trailing)
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details, details)


class Aborted(Exception):
    """Raised by ``Context.abort`` to leave a handler."""


class Context:
    """What a handler sees of its call."""

    def __init__(self, call: ServerCall, deserialize: Callable[[bytes], Any], serialize: Callable[[Any], bytes]):
        self._call, self._deserialize, self._serialize = call, deserialize, serialize

    async def read(self) -> Any:
        """Returns the next request, or EOF after the last."""
        data = await self._call.requests.next()
        return EOF if data is None else self._deserialize(data)

    async def write(self, message: Any) -> None:
        """Sends a reply once the window has room."""
        await self._call.reply(self._serialize(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        """Ends the call with a status."""
        self._call.finish((code, details, tuple(trailing_metadata)))
        raise Aborted(details)

    def peer(self) -> str:
        """Returns who calls."""
        return f"sim:{self._call.connection.client}"

    def invocation_metadata(self) -> Metadata:
        """Returns what came with the call: nothing here."""
        return ()

    async def requests(self) -> AsyncIterator[Any]:
        """Iterates over the requests."""
        while (message := await self.read()) is not EOF:
            yield message


class ServerCall:
    """The server's end of one RPC."""

    def __init__(self, client: Call, connection: Connection, path: str) -> None:
        self._client, self.connection, self._path = client, connection, path
        self.requests = Stream()
        self._task: asyncio.Task[None] | None = None
        self._finished = False

    def begin(self) -> None:
        """Starts the handler, in the process that listens."""
        server = self.connection.listener
        assert isinstance(server, Server)
        handler = server.handler(self._path)
        if handler is None:
            self.finish((grpc.StatusCode.UNIMPLEMENTED, f"{self._path} is not served here", ()))
            return
        self.connection.when_broken(self.cancel)
        self._task = server.spawn(self._run(handler), f"{self._path} of {self.connection.client}")

    def cancel(self) -> None:
        """Ends the handler: the client left, or was lost."""
        self._finished = True
        self.requests.end()
        if self._task is not None:
            self._task.cancel()

    async def reply(self, data: bytes) -> None:
        """Sends a reply."""
        if self._finished:
            raise asyncio.CancelledError
        client = self._client
        client.replies.sending(len(data))
        self.connection.down.send(lambda: client.replied(data), len(data))
        await asyncio.sleep(0)
        await client.replies.room()

    def finish(self, status: tuple[grpc.StatusCode, str, Metadata]) -> None:
        """Sends the status; nothing follows."""
        if not self._finished:
            self._finished = True
            client = self._client
            self.connection.down.send(lambda: client.ended(status), 50)

    async def _run(self, handler: Any) -> None:
        context = Context(self, handler.request_deserializer or _same, handler.response_serializer or _same)
        try:
            await _handle(handler, context)
        except Aborted:
            return
        except asyncio.CancelledError:
            self.finish((CANCELLED, "the handler was cancelled", ()))
            raise
        except Exception as error:
            self.finish((grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}", ()))
            raise
        self.finish((grpc.StatusCode.OK, "", ()))


async def _handle(handler: Any, context: Context) -> None:
    if not handler.request_streaming and not handler.response_streaming:
        request = await context.read()
        await context.write(await handler.unary_unary(request, context))
        return
    request = context.requests() if handler.request_streaming else await context.read()
    behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
    replies = behavior(request, context)
    if not hasattr(replies, "__aiter__"):
        await replies
        return
    async with contextlib.aclosing(replies):
        async for reply in replies:
            await context.write(reply)


class Server:
    """A gRPC server of one process. ``spawn`` starts a task of that process."""

    def __init__(self, spawn: Callable[[Any, str], asyncio.Task[None]]) -> None:
        self.spawn = spawn
        self._methods: dict[str, Any] = {}
        self._generic: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Registers handlers that are looked up by path."""
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Registers a service's methods."""
        self._methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def handler(self, path: str) -> Any:
        """Returns the handler of a method, or None."""
        if path in self._methods:
            return self._methods[path]
        details = _Details(path)
        return next((found for each in self._generic if (found := each.service(details)) is not None), None)


class _Details:
    """What a generic handler asks of a call."""

    invocation_metadata: Metadata = ()

    def __init__(self, method: str) -> None:
        self.method = method


class _Method:
    """A method of a channel: calling it begins an RPC."""

    def __init__(self, channel: Channel, path: str, unary: bool, serialize: Any, deserialize: Any) -> None:
        self.channel, self.path, self._unary = channel, path, unary
        self.serialize, self.deserialize = serialize or _same, deserialize or _same

    def __call__(self, request: Any = None, *, timeout: float | None = None, **_: object) -> Call:
        call = Call(self, timeout)
        if self._unary:
            call.send_request(request)
        return call


class Channel:
    """A channel from a process to an address: one connection at a time, made when it is needed."""

    def __init__(self, network: Network, process: str, address: str) -> None:
        self.network, self.address = network, address
        self._process = process
        self._connection: Connection | None = None
        self._closed = False
        self._state = Ready.IDLE
        self._changes: deque[asyncio.Event] = deque()

    def unary_unary(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object
    ) -> Any:
        """Returns a method that sends one message and gets one."""
        return _Method(self, path, True, request_serializer, response_deserializer)

    def unary_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object
    ) -> Any:
        """Returns a method that sends one message and gets many."""
        return _Method(self, path, True, request_serializer, response_deserializer)

    def stream_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object
    ) -> Any:
        """Returns a method that sends many messages and gets many."""
        return _Method(self, path, False, request_serializer, response_deserializer)

    def connection(self) -> Connection | None:
        """Returns the connection that a new call rides on; None where there is no way."""
        if self._closed:
            return None
        if self._connection is None or self._connection.broken:
            self._connection = self.network.connect(self._process, self.address)
            self._become(Ready.TRANSIENT_FAILURE if self._connection is None else Ready.READY)
            if self._connection is not None:
                self._connection.when_broken(lambda: self._become(Ready.IDLE))
        return self._connection

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Returns the channel's state."""
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        """Returns when the state is another one than ``last``."""
        while self._state is last:
            changed = asyncio.Event()
            self._changes.append(changed)
            await changed.wait()

    async def close(self, grace: float | None = None) -> None:
        """Ends every call on the channel."""
        self._closed = True
        if self._connection is not None:
            self._connection.break_now()
        self._become(Ready.SHUTDOWN)

    def _become(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        while self._changes:
            self._changes.popleft().set()


class SimulatedDialer(Dialer):
    """Gives out channels of a simulated process."""

    def __init__(self, network: Network, process: str) -> None:
        super().__init__(None)
        self._network, self._process = network, process

    def channel(self, address: str, role: str = "worker", options: Any = ()) -> Any:
        """Returns a channel to ``address``."""
        return Channel(self._network, self._process, address)


def _deadline(timeout: float | None) -> tuple[grpc.StatusCode, str, Metadata]:
    return grpc.StatusCode.DEADLINE_EXCEEDED, f"Deadline Exceeded after {timeout} s", ()


def _same(message: Any) -> Any:
    return message
