"""Fuzzes gRPC: calls every method of the services with odd messages, damaged bytes and odd metadata."""

from __future__ import annotations

import asyncio
import random
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from baton.protos.v1 import inference_pb2, open_inference_pb2
from tests.e2e.fuzz.values import TEXTS, damaged

ANSWER_S = 60.0
SERVICES: tuple[ServiceDescriptor, ...] = (
    *inference_pb2.DESCRIPTOR.services_by_name.values(),
    *open_inference_pb2.DESCRIPTOR.services_by_name.values(),
    *health_pb2.DESCRIPTOR.services_by_name.values(),
)
ENDLESS = ("Watch",)
SERVER_ERRORS = {
    grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED}
METADATA = [
    ("authorization", "Bearer x"), ("x-request-id", "a" * 300), ("x-slo-ttft-ms", "nan"),
    ("x-slo-tpot-ms", "60000"),
    ("traceparent", "00-zz"), ("x-session-id", "s" * 300), ("x-odd-bin", b"\x00\xff" * 9), ("x-long", "a" * 4000),
]  # fmt: skip


class Call(NamedTuple):
    """``messages`` as bytes; ``readable``: each parses as what the method takes."""

    path: str
    streams: tuple[bool, bool]
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, Any], ...]
    readable: bool


def call(rng: random.Random, model: str) -> Call:
    """Draws one input."""
    methods = [m for s in SERVICES for m in s.methods if m.name not in ENDLESS]
    method = rng.choice(methods)
    kind = GetMessageClass(method.input_type)
    raws = [_message(rng, kind, model) for _ in range(rng.choice([0, 1, 1, 3]) if method.client_streaming else 1)]
    path = f"/{method.containing_service.full_name}/{method.name}"
    if rng.random() < 0.01:
        path += "x"
    metadata = tuple(rng.sample(METADATA, rng.randrange(3))) if rng.random() < 0.1 else ()
    streams = (method.client_streaming, method.server_streaming)
    return Call(path, streams, tuple(raws), metadata, all(_parses(kind, raw) for raw in raws))


# What grpc.aio's client says of a write that came after the server had ended the stream: no word of the server's.
# The blocking client says the server's status then.
OUR_OWN = "Internal error from Core"


async def server_error(channel: grpc.aio.Channel, target: str, asked: Call) -> str:
    """Returns what the server at ``target`` (host:port), behind ``channel``, did wrong; "" when nothing."""
    code, details = await _ask(channel, asked)
    if OUR_OWN in details:
        code, details = await asyncio.to_thread(_ask_blocking, target, asked)
    if asked.readable or code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{code.name}: {details}" if code in SERVER_ERRORS else ""
    return "" if code in REFUSALS else f"{code.name} for bytes that are no message: {details}"


async def _ask(channel: grpc.aio.Channel, asked: Call) -> tuple[grpc.StatusCode, str]:
    kinds = {
        (False, False): channel.unary_unary, (False, True): channel.unary_stream,
        (True, False): channel.stream_unary, (True, True): channel.stream_stream,
    }  # fmt: skip
    sent = iter(asked.messages) if asked.streams[0] else asked.messages[0]
    made = kinds[asked.streams](asked.path)(sent, timeout=ANSWER_S, metadata=asked.metadata)
    try:
        if asked.streams[1]:
            async for _ in made:
                pass
        else:
            await made
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def _ask_blocking(target: str, asked: Call) -> tuple[grpc.StatusCode, str]:
    with grpc.insecure_channel(target) as channel:
        kinds = {
            (False, False): channel.unary_unary, (False, True): channel.unary_stream,
            (True, False): channel.stream_unary, (True, True): channel.stream_stream,
        }  # fmt: skip
        sent = iter(asked.messages) if asked.streams[0] else asked.messages[0]
        try:
            made = kinds[asked.streams](asked.path)(sent, timeout=ANSWER_S, metadata=asked.metadata)
            if asked.streams[1]:
                for _ in made:
                    pass
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def _message(rng: random.Random, kind: type[Message], model: str) -> bytes:
    message = _fuzzed(rng, kind())
    for name in ("model", "model_name", "name"):
        if rng.random() < 0.85 and name in message.DESCRIPTOR.fields_by_name:
            setattr(message, name, model)
    if "sampling" in message.DESCRIPTOR.fields_by_name and rng.random() < 0.8:
        message.sampling.max_tokens = rng.choice([1, 2, 5])  # type: ignore[attr-defined]
    raw: bytes = message.SerializeToString()
    return damaged(rng, raw) if rng.random() < 0.15 else raw


def _parses(kind: type[Message], raw: bytes) -> bool:
    try:
        kind.FromString(raw)
    except DecodeError:
        return False
    return True


def _fuzzed(rng: random.Random, message: Message, depth: int = 0) -> Message:
    """Some of its fields, filled oddly."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5 or depth > 4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(rng, message, field, depth)
        elif field.is_repeated:
            target = getattr(message, field.name)
            for _ in range(rng.randrange(3)):
                if field.message_type is not None:
                    _fuzzed(rng, target.add(), depth + 1)
                else:
                    target.append(_odd(rng, field))
        elif field.message_type is not None:
            _fuzzed(rng, getattr(message, field.name), depth + 1).SetInParent()
        else:
            setattr(message, field.name, _odd(rng, field))
    return message


def _fill_map(rng: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    target, of = getattr(message, field.name), field.message_type.fields_by_name
    for _ in range(rng.randrange(3)):
        key = _odd(rng, of["key"])
        if of["value"].message_type is not None:
            _fuzzed(rng, target[key], depth + 1)
        else:
            target[key] = _odd(rng, of["value"])


def _odd(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice([t for t in TEXTS if t != "\ud83d"])
        return rng.randbytes(rng.choice([0, 4, 40])) if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([0, 1, 7])
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice([0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), 3e38])
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    return rng.choice([0, 1, 2, 5, 300, 2**31 - 1] + ([-1, -(2**31)] if signed else []))
