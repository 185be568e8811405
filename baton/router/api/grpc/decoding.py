"""gRPC requests whose bytes can't be decoded get INVALID_ARGUMENT, where grpc.aio itself would say UNKNOWN.

Knows nothing of which messages there are.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.protos.errors import InvalidRequest
from baton.router.api.grpc.errors import grpc_errors
from baton.router.api.grpc.unread import while_taken

Context: TypeAlias = grpc.aio.ServicerContext
R = TypeVar("R")
Requests = AsyncIterator[object]
ToOne = Callable[[R, Context], Awaitable[object]]
ToMany = Callable[[R, Context], AsyncIterator[object]]


class _UnreadableMessage:
    """Stands for a message that could not be read."""

    def __init__(self, why: str) -> None:
        self._why = why

    def refuse(self) -> None:
        raise InvalidRequest(f"the bytes are no message of this method's type: {self._why}")


def with_decode_errors(handler: grpc.RpcMethodHandler | None) -> grpc.RpcMethodHandler | None:
    """Returns the gRPC method handler wrapped so that undecodable requests end with InvalidRequest; None for
    None.
    """
    if handler is None or handler.request_deserializer is None:
        return handler
    make = _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)]
    behaviour = getattr(handler, make.__name__.removesuffix("_rpc_method_handler"))
    # A method that streams may also write to its context and return nothing (health's Watch does).
    wrap = _WRAPS[bool(handler.request_streaming), inspect.isasyncgenfunction(behaviour)]
    return make(wrap(behaviour), _reading(handler.request_deserializer), handler.response_serializer)


def _reading(deserialize: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def read(raw: bytes) -> object:
        try:
            return deserialize(raw)
        except DecodeError as error:
            return _UnreadableMessage(str(error))

    return read


def _one(behaviour: ToOne[object]) -> ToOne[object]:
    async def answer(request: object, context: Context) -> object:
        if isinstance(request, _UnreadableMessage):
            async with grpc_errors(context):
                request.refuse()
        return await behaviour(request, context)

    return answer


def _one_to_many(behaviour: ToMany[object]) -> ToMany[object]:
    async def answer(request: object, context: Context) -> Requests:
        if isinstance(request, _UnreadableMessage):
            async with grpc_errors(context):
                request.refuse()
        async for response in while_taken(behaviour(request, context)):
            yield response

    return answer


def _many_to_one(behaviour: ToOne[Requests]) -> ToOne[Requests]:
    async def answer(requests: Requests, context: Context) -> object:
        async with grpc_errors(context):
            return await behaviour(_whole(requests), context)

    return answer


def _many_to_many(behaviour: ToMany[Requests]) -> ToMany[Requests]:
    async def answer(requests: Requests, context: Context) -> Requests:
        async with grpc_errors(context):
            async for response in while_taken(behaviour(_whole(requests), context)):
                yield response

    return answer


async def _whole(requests: Requests) -> Requests:
    async for request in requests:
        if isinstance(request, _UnreadableMessage):
            request.refuse()
        yield request


_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_WRAPS: dict[tuple[bool, bool], Callable[..., object]] = {
    (False, False): _one,
    (False, True): _one_to_many,
    (True, False): _many_to_one,
    (True, True): _many_to_many,
}
