"""Counts the messages of gRPC calls that aren't answered yet, beside REST's bodies.

Knows nothing of which messages there are.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.router.api.grpc.errors import grpc_errors
from baton.router.api.limits import BodiesInFlight

Context: TypeAlias = grpc.aio.ServicerContext
Messages = AsyncIterator[Message]


def with_counted_bodies(
    handler: grpc.RpcMethodHandler | None, bodies: BodiesInFlight
) -> grpc.RpcMethodHandler | None:
    """Returns the gRPC method handler wrapped so that its requests count among ``bodies`` until they are answered,
    and end with Overloaded where there is no room; None for None.
    """
    if handler is None:
        return None
    codec = handler.request_deserializer, handler.response_serializer
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(_many(handler.stream_stream, bodies), *codec)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_one_to_many(handler.unary_stream, bodies), *codec)
    assert not handler.request_streaming, "no method of ours gathers a stream for one answer"
    return grpc.unary_unary_rpc_method_handler(_one(handler.unary_unary, bodies), *codec)


def _one(
    behaviour: Callable[[Message, Context], Awaitable[Message]], bodies: BodiesInFlight
) -> Callable[[Message, Context], Awaitable[Message]]:
    async def answer(request: Message, context: Context) -> Message:
        async with grpc_errors(context):
            with bodies.holding(request.ByteSize()):
                return await behaviour(request, context)

    return answer


def _one_to_many(
    behaviour: Callable[[Message, Context], Messages], bodies: BodiesInFlight
) -> Callable[[Message, Context], Messages]:
    async def answer(request: Message, context: Context) -> Messages:
        async with grpc_errors(context):
            with bodies.holding(request.ByteSize()):
                async for response in behaviour(request, context):
                    yield response

    return answer


def _many(
    behaviour: Callable[[Messages, Context], Messages], bodies: BodiesInFlight
) -> Callable[[Messages, Context], Messages]:
    async def answer(requests: Messages, context: Context) -> Messages:
        async with grpc_errors(context), aclosing(_counted(requests, bodies)) as counted:
            async for response in behaviour(counted, context):
                yield response

    return answer


async def _counted(requests: Messages, bodies: BodiesInFlight) -> AsyncGenerator[Message, None]:
    """Yields each request; it counts until the next is asked for."""
    async for request in requests:
        with bodies.holding(request.ByteSize()):
            yield request
