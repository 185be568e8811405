"""The server side of simulated gRPC: handlers, their contexts, and the calls in progress."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Protocol

import grpc

from baton.drill.machines.network import NetworkConnection
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


class ClientEnd(Protocol):
    """The part of the client's end that a call's server uses; ``rpc.client.Call`` implements it."""

    @property
    def replies(self) -> Stream:
        """Returns the stream of replies to the client."""

    def replied(self, data: bytes) -> None:
        """Receives a reply's bytes from the network."""

    def ended(self, status: Status) -> None:
        """Receives the status from the network, after the last reply."""


class Aborted(grpc.aio.AbortError):  # type: ignore[misc]
    """Raised by ``Context.abort`` to leave a handler."""


class Context:
    """The view that a handler has of its call, as ``grpc.aio.ServicerContext``."""

    def __init__(self, call: ServerCall, deserialize: Deserialize, serialize: Serialize):
        self._call, self._deserialize, self._serialize = call, deserialize, serialize

    async def read(self) -> Message:
        """Returns the next request, or EOF after the last."""
        data = await self._call.requests.next()
        if data is None:
            return EOF
        self._call.connection.allocate()
        return self._deserialize(data)

    async def write(self, message: Message) -> None:
        """Sends a reply and waits until the flow-control window has room."""
        self._call.connection.allocate()
        await self._call.reply(self._serialize(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        """Ends the call with status ``code``. Raises Aborted, always."""
        self._call.finish((code, details, tuple(trailing_metadata)))
        raise Aborted(details)

    def peer(self) -> str:
        """Returns "sim:" and the name of the calling process."""
        return f"sim:{self._call.connection.client}"

    def invocation_metadata(self) -> Metadata:
        """Returns the metadata that the client sent."""
        return self._call.metadata

    def time_remaining(self) -> float | None:
        """Returns the seconds until the call's deadline, None for a call that has none."""
        until = self._call.until
        return None if until is None else max(0.0, until - asyncio.get_running_loop().time())

    async def requests(self) -> AsyncIterator[Message]:
        """Yields the requests until the client has sent its last."""
        while (message := await self.read()) is not EOF:
            yield message


class ServerCall:
    """The server's end of one RPC. ``metadata`` and the ``timeout`` in seconds are the client's."""

    def __init__(
        self,
        client: ClientEnd,
        connection: NetworkConnection,
        path: str,
        metadata: Metadata = (),
        timeout: float | None = None,
    ) -> None:
        self._client, self.connection, self._path = client, connection, path
        self.metadata, self._timeout = metadata, timeout
        self.until: float | None = None  # loop time of the deadline
        self.requests = Stream()
        self._task: asyncio.Task[None] | None = None
        self._finished = False

    def begin(self) -> None:
        """Starts the handler as a task of the listening process; ends the call as UNIMPLEMENTED if there is no
        handler.
        """
        server = self.connection.listener
        assert isinstance(server, Server)
        handler = server.handler(self._path)
        if server.stopping:
            self.finish((UNAVAILABLE, "the server is stopping", ()))
            return
        if handler is None:
            self.finish((grpc.StatusCode.UNIMPLEMENTED, f"{self._path} is not served here", ()))
            return
        self.connection.when_broken(self.cancel, self.connection.server)
        if self._timeout is not None:
            self.until = asyncio.get_running_loop().time() + self._timeout
        self._task = server.spawn(self._run(handler, server), f"{self._path} of {self.connection.client}")
        server.began(self)
        self._task.add_done_callback(lambda task: self._over(server))

    def _over(self, server: Server) -> None:
        self.connection.forget(self.cancel)
        server.ended(self)

    def cancel(self) -> None:
        """Cancels the handler, because the client cancelled or its connection broke."""
        self._finished = True
        self.requests.end()
        if self._task is not None:
            self._task.cancel()

    async def reply(self, data: bytes) -> None:
        """Sends a reply and waits until the flow-control window has room. Raises CancelledError if the call is
        over.
        """
        if self._finished:
            raise asyncio.CancelledError
        client = self._client
        client.replies.sending(len(data))
        self.connection.down.send(lambda: client.replied(data), len(data))
        await client.replies.room()

    def finish(self, status: Status) -> None:
        """Sends the status, after which nothing follows; does nothing if the call is over."""
        if not self._finished:
            self._finished = True
            client = self._client
            self.connection.down.send(lambda: client.ended(status), 50)

    async def _run(self, handler: grpc.RpcMethodHandler, server: Server) -> None:
        if server.interceptors:
            handler = await server.intercepted(_Details(self._path, self.metadata))
        context = Context(self, handler.request_deserializer or same, handler.response_serializer or same)
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


async def _handle(handler: grpc.RpcMethodHandler, context: Context) -> None:
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
    """A gRPC server of one simulated process. ``spawn`` (work, name) starts a task of that process."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[object, object, None], str], asyncio.Task[None]],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self.spawn, self.interceptors = spawn, interceptors
        self._methods: dict[str, grpc.RpcMethodHandler] = {}
        self._calls: dict[ServerCall, None] = {}
        self._generic: list[grpc.GenericRpcHandler] = []
        self.stopping = False

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Registers generic handlers, which look methods up by path."""
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        """Registers the handlers of a service's methods, by method name."""
        self._methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def began(self, call: ServerCall) -> None:
        """Registers a call in progress."""
        self._calls[call] = None

    def ended(self, call: ServerCall) -> None:
        """Unregisters a call that is over."""
        self._calls.pop(call, None)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits at most ``grace_s`` seconds for those in progress, then cancels the rest and
        breaks their connections.

        Idle connections stay; ``Network.hang_up`` breaks them, as a gRPC server that stops closes them.
        """
        self.stopping = True
        deadline = asyncio.get_running_loop().time() + grace_s
        while self._calls and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for call in list(self._calls):
            call.cancel()
            call.connection.break_now()

    async def intercepted(self, details: _Details) -> grpc.RpcMethodHandler:
        """Returns the handler of a call as the interceptors leave it, the first of which is asked first."""

        async def last(details: _Details) -> grpc.RpcMethodHandler | None:
            return self.handler(details.method)

        ask: Callable[[_Details], Awaitable[grpc.RpcMethodHandler | None]] = last
        for one in reversed(self.interceptors):
            ask = partial(one.intercept_service, ask)
        found = await ask(details)
        assert found is not None, "a call begins where there is a handler"
        return found

    def handler(self, path: str) -> grpc.RpcMethodHandler | None:
        """Returns the handler of the method ``path``; None if there is none."""
        if path in self._methods:
            return self._methods[path]
        details = _Details(path)
        return next((found for each in self._generic if (found := each.service(details)) is not None), None)


class _Details:
    """The method's path and the metadata by which a generic handler of gRPC finds a method."""

    def __init__(self, method: str, invocation_metadata: Metadata = ()) -> None:
        self.method, self.invocation_metadata = method, invocation_metadata
