"""Fuzzed bodies and messages, over REST and gRPC: nothing crashes, and nothing is answered with a server error."""

from __future__ import annotations

import json
import random
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton.cluster.batch_store import BatchStore
from baton.protos.v1 import inference_pb2, inference_pb2_grpc, open_inference_pb2, open_inference_pb2_grpc
from baton.router.openapi import BODIES

PATHS = {
    "CompletionBody": "/v1/completions",
    "ChatBody": "/v1/chat/completions",
    "ResponsesBody": "/v1/responses",
    "EmbeddingsBody": "/v1/embeddings",
    "BatchBody": "/v1/batches",
    "TokenizeBody": "/tokenize",
    "DetokenizeBody": "/detokenize",
    "InferBody": "/v2/models/tiny/infer",
    "GenerateBody": "/v2/models/tiny/generate",
}
GOOD: dict[str, Any] = {
    "prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "tokens": [5], "text_input": "x",
    "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}], "max_tokens": 2,
}  # fmt: skip
TEXTS = [
    "",
    "x",
    "é",
    "\x00",
    "日本" * 50,
    "a" * 3000,
    '{"type": "object"}',
    "(",
    "[a-z]+",
    "<tool_call>",
    "tiny",
    "\ud83d",
]
NUMBERS = [0, 1, -1, 2, 7, 21, 400, 2**31, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308, 2.5]
KEYS = [
    "type",
    "role",
    "content",
    "function",
    "name",
    "parameters",
    "schema",
    "json_schema",
    "text",
    "properties",
    "5",
]


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, odd ones more often."""
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind in (2, 3):
        return rng.choice(TEXTS)
    if kind == 4:
        return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): junk(rng, depth + 1) for _ in range(rng.randrange(4))}


def fuzzed_body(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body: a good one with some fields made odd, or bytes cut and changed."""
    body = rng.choice(BODIES)
    fields = [field.alias or name for name, field in body.model_fields.items()]
    said = {name: value for name, value in GOOD.items() if name in fields}
    for name in rng.sample(fields, rng.randint(0, min(3, len(fields)))):
        said[name] = junk(rng)
    said.pop("stream", None)
    raw = bytearray(json.dumps(said, ensure_ascii=rng.random() < 0.7).encode(errors="replace"))
    if rng.random() < 0.1 and raw:
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return PATHS[body.__name__], bytes(raw)


def fuzz_message(rng: random.Random, message: Message, depth: int = 0) -> Message:
    """Some of its fields, filled oddly."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5 or depth > 4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            target = getattr(message, field.name)
            for _ in range(rng.randrange(3)):
                if field.message_type is not None:
                    fuzz_message(rng, target.add(), depth + 1)
                else:
                    target.append(odd(rng, field))
        elif field.message_type is not None:
            fuzz_message(rng, getattr(message, field.name), depth + 1).SetInParent()
        else:
            setattr(message, field.name, odd(rng, field))
    return message


def odd(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(TEXTS[:-1])
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice([0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), 3e38])
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    return rng.choice([0, 1, 2, 5, 300, 2**31 - 1] + ([-1, -(2**31)] if signed else []))


@pytest.fixture
async def target(start_router, fake, model_dir, redis):
    async with start_router(fake, {"tiny": model_dir}, batches=BatchStore(redis, "t")) as clients:
        yield clients


COUNTS = [400, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]


@pytest.mark.parametrize("count", COUNTS)
async def test_no_fuzzed_body_is_a_server_error(target, count: int) -> None:
    for seed in range(count):
        path, raw = fuzzed_body(random.Random(seed))
        headers = {"content-type": "application/json", "x-request-timeout": "5"}
        response: httpx.Response = await target.http.post(path, content=raw, headers=headers)
        assert response.status_code < 500, (seed, path, raw[:500], response.text)


@pytest.mark.parametrize("count", COUNTS)
async def test_no_fuzzed_message_is_a_server_error(target, count: int) -> None:
    ours = inference_pb2_grpc.InferenceStub(target.channel)
    protocol = open_inference_pb2_grpc.GRPCInferenceServiceStub(target.channel)
    calls = [
        (ours.Generate, inference_pb2.GenerateRequest),
        (ours.Tokenize, inference_pb2.TokenizeRequest),
        (ours.Detokenize, inference_pb2.DetokenizeRequest),
        (protocol.ModelInfer, open_inference_pb2.ModelInferRequest),
        (protocol.ModelMetadata, open_inference_pb2.ModelMetadataRequest),
    ]
    bad = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
    for seed in range(count):
        rng = random.Random(seed)
        call, kind = rng.choice(calls)
        message = fuzz_message(rng, kind())
        for name in ("model", "model_name", "name"):
            if hasattr(message, name) and rng.random() < 0.8:
                setattr(message, name, "tiny")
        made = call(message, timeout=5)
        code = await made.code()
        assert code not in bad, (seed, message, await made.details())
