"""Describes each endpoint's answers as JSON Schemas, the half of OpenAPI's document that code doesn't give.

Knows nothing of how an answer is made; ``tests/router/test_schemathesis.py`` holds the two together.
"""

from __future__ import annotations

from baton.protos.json import Json

TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
TIME: Json = {"type": "integer", "description": "Unix time in seconds"}
NUMBER: Json = {"type": "number"}
FLAG: Json = {"type": "boolean"}
IDS: Json = {"type": "array", "items": COUNT}
NAMES: Json = {"type": "object", "additionalProperties": TEXT}
REASON: Json = {"enum": ["stop", "length", "tool_calls", None]}
ERROR_TYPES = ["invalid_request_error", "rate_limit_error", "server_error"]


def ref(name: str) -> Json:
    """Returns the JSON Schema reference to component ``name`` of the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{name}"}


def items(schema: Json) -> Json:
    """Returns the JSON Schema of an array of ``schema``."""
    return {"type": "array", "items": schema}


def nullable(schema: Json) -> Json:
    """Returns the JSON Schema of a value that is ``schema`` or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def shape(kind: str | None = None, optional: tuple[str, ...] = (), /, **fields: Json) -> Json:
    """Returns the JSON Schema of an object with ``fields``, all required except ``optional``; ``kind`` is its
    constant ``object``.
    """
    named = {} if kind is None else {"object": {"const": kind}}
    required = [*named, *(name for name in fields if name not in optional)]
    return {"type": "object", "required": required, "properties": named | fields}


def list_of(of: Json, *more: str) -> Json:
    """Returns the JSON Schema of OpenAI's list object whose entries are ``of``; ``more`` names further keys of any
    type.
    """
    return shape("list", data=items(of), **{name: {} for name in more})


_ADAPTER: Json = {
    "id": TEXT, "parent": TEXT, "root": TEXT, "adapter_id": TEXT, "tenant": TEXT, "pinned": FLAG, "by": TEXT,
    "created": TIME, "workers": items(TEXT),
}  # fmt: skip
_ONE_LOGPROB = {"token": TEXT, "logprob": NUMBER, "bytes": IDS}
_ANSWER: Json = {"id": TEXT, "created": TIME, "model": TEXT}
_CHOICE_EXTRAS: Json = {"token_ids": IDS, "prompt_token_ids": nullable(IDS)}
_COMPLETION_CHOICE = shape(
    None, ("token_ids", "prompt_token_ids", "prompt_logprobs"),
    index=COUNT, text=TEXT, logprobs=nullable(ref("CompletionLogprobs")), finish_reason=REASON,
    prompt_logprobs=nullable(items(nullable({"type": "object"}))), **_CHOICE_EXTRAS,
)  # fmt: skip
_CALL = shape(None, id=TEXT, type={"const": "function"}, function=shape(None, name=TEXT, arguments=TEXT))
_CALL_PART = shape(
    None, ("id", "type"), index=COUNT, id=TEXT, type={"const": "function"},
    function=shape(None, ("name",), name=TEXT, arguments=TEXT),
)  # fmt: skip
_MESSAGE = shape(
    None, ("tool_calls", "reasoning_content"),
    role={"const": "assistant"}, content=nullable(TEXT), refusal={"type": "null"}, tool_calls=items(_CALL),
    reasoning_content=TEXT,
)  # fmt: skip
_DELTA = shape(
    None, ("role", "content", "tool_calls", "reasoning_content"),
    role={"const": "assistant"}, content=TEXT, tool_calls=items(_CALL_PART), reasoning_content=TEXT,
)  # fmt: skip
_BLOCK = shape(
    None, ("text", "thinking", "signature", "id", "name", "input"),
    type={"enum": ["text", "thinking", "tool_use"]}, text=TEXT, thinking=TEXT, signature=TEXT, id=TEXT, name=TEXT,
    input={"type": "object"},
)  # fmt: skip
_TENSOR = shape(
    None, ("data", "parameters"), name=TEXT, datatype=TEXT, shape=IDS, data={"type": "array"},
    parameters={"type": "object"},
)  # fmt: skip
_TENSOR_KIND = shape(None, name=TEXT, datatype=TEXT, shape=items({"type": "integer"}))

_ERROR = shape(
    None, message=TEXT, type={"enum": ERROR_TYPES}, param={"type": ["string", "null"]}, code=TEXT
)  # fmt: skip

COMPONENTS: dict[str, Json] = {
    "Usage": shape(
        None, ("completion_tokens_details",), prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT,
        prompt_tokens_details=shape(None, cached_tokens=COUNT),
        completion_tokens_details=shape(None, accepted_prediction_tokens=COUNT, rejected_prediction_tokens=COUNT),
    ),
    "CompletionLogprobs": shape(
        None, tokens=items(TEXT), token_logprobs=items(nullable(NUMBER)), text_offset=IDS,
        top_logprobs=items(nullable({"type": "object", "additionalProperties": NUMBER})),
    ),
    "ChatLogprobs": shape(
        None, refusal={"type": "null"},
        content=items(shape(None, **_ONE_LOGPROB, top_logprobs=items(shape(None, **_ONE_LOGPROB)))),
    ),
    "Completion": shape("text_completion", **_ANSWER, choices=items(_COMPLETION_CHOICE), usage=ref("Usage")),
    "CompletionChunk": shape(
        "text_completion", ("usage",), **_ANSWER, choices=items(_COMPLETION_CHOICE), usage=nullable(ref("Usage"))
    ),
    "ChatCompletion": shape(
        "chat.completion", ("prompt_token_ids", "prompt_logprobs"), **_ANSWER, usage=ref("Usage"),
        choices=items(shape(
            None, ("token_ids",), index=COUNT, message=_MESSAGE, logprobs=nullable(ref("ChatLogprobs")),
            finish_reason=REASON, token_ids=IDS,
        )),
        prompt_token_ids=IDS, prompt_logprobs=items(nullable({"type": "object"})),
    ),
    "ChatCompletionChunk": shape(
        "chat.completion.chunk", ("usage", "prompt_token_ids"), **_ANSWER, usage=nullable(ref("Usage")),
        choices=items(shape(
            None, ("token_ids",), index=COUNT, delta=_DELTA, logprobs=nullable(ref("ChatLogprobs")),
            finish_reason=REASON, token_ids=IDS,
        )),
        prompt_token_ids=IDS,
    ),
    "Response": shape(
        "response", id=TEXT, created_at=TIME, model=TEXT,
        status={"enum": ["completed", "incomplete", "in_progress"]}, error={"type": "null"},
        incomplete_details=nullable(shape(None, reason=TEXT)),
        output=items(shape(None, ("status",), type=TEXT, id=TEXT)),
        parallel_tool_calls=FLAG, previous_response_id={"type": "null"}, store={"const": False},
        usage=nullable(shape(
            None, input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT,
            input_tokens_details=shape(None, cached_tokens=COUNT, cache_write_tokens=COUNT),
            output_tokens_details=shape(None, reasoning_tokens=COUNT),
        )),
        metadata=NAMES, tools={"type": "array"}, text={"type": "object"},
    ),
    "Message": shape(
        None, id=TEXT, type={"const": "message"}, role={"const": "assistant"}, model=TEXT,
        content=items(_BLOCK),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", None]},
        stop_sequence=nullable(TEXT),
        usage=shape(
            None, input_tokens=COUNT, cache_creation_input_tokens=COUNT, cache_read_input_tokens=COUNT,
            cache_creation=shape(None, ephemeral_5m_input_tokens=COUNT, ephemeral_1h_input_tokens=COUNT),
            output_tokens=COUNT,
        ),
    ),
    "CountedTokens": shape(None, input_tokens=COUNT),
    "Embeddings": shape(
        "list", model=TEXT, usage=shape(None, prompt_tokens=COUNT, total_tokens=COUNT),
        data=items(shape("embedding", index=COUNT, embedding={"anyOf": [items(NUMBER), TEXT]})),
    ),
    "Reranked": shape(
        None, id=TEXT, model=TEXT, usage=shape(None, prompt_tokens=COUNT, total_tokens=COUNT),
        results=items(shape(
            None, ("document",), index=COUNT, relevance_score=NUMBER, document=shape(None, text=TEXT),
        )),
    ),
    "Scored": shape(
        "list", id=TEXT, created=TIME, model=TEXT, data=items(shape("score", index=COUNT, score=NUMBER)),
        usage=shape(None, prompt_tokens=COUNT, total_tokens=COUNT, completion_tokens=COUNT),
    ),
    "Model": shape(
        "model", id=TEXT, created=TIME, owned_by=TEXT, root=TEXT, parent=nullable(TEXT), max_model_len=COUNT,
        type={"const": "model"}, display_name=TEXT, created_at={"type": "string", "format": "date-time"},
        lifecycle={"const": "active"}, max_input_tokens=COUNT,
    ),
    "Adapter": shape("adapter", **_ADAPTER),
    "AdapterChanged": shape("adapter", message=TEXT, **_ADAPTER),
    "Adapters": list_of(ref("Adapter")),
    "PinnedPrefix": shape(
        "cache.prefix",
        id=TEXT,
        model=TEXT,
        tokens=COUNT,
        tenant=TEXT,
        created=TIME,
        expires_at=TIME,
        workers=items(shape(None, worker=TEXT, tokens=COUNT)),
        lost_workers=items(TEXT),
    ),
    "PinnedPrefixes": list_of(ref("PinnedPrefix")),
    "DeletedPrefix": shape("cache.prefix", id=TEXT, deleted={"const": True}),
    "Models": list_of(ref("Model"), "first_id", "last_id", "has_more"),
    "Tokenized": shape(
        None, ("token_strs",), count=COUNT, max_model_len=COUNT, tokens=IDS, token_strs=items(TEXT)
    ),
    "Detokenized": shape(None, prompt=TEXT),
    "File": shape("file", id=TEXT, bytes=COUNT, created_at=TIME, filename=TEXT, purpose=TEXT, status=TEXT),
    "Files": list_of(ref("File"), "first_id", "last_id", "has_more"),
    "DeletedFile": shape("file", id=TEXT, deleted={"const": True}),
    "Batch": shape(
        "batch", id=TEXT, endpoint=TEXT, input_file_id=TEXT, completion_window=TEXT, created_at=TIME,
        status={"enum": [
            "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled",
        ]},
        errors=nullable(list_of({})), output_file_id=nullable(TEXT), error_file_id=nullable(TEXT), expires_at=TIME,
        request_counts=shape(None, total=COUNT, completed=COUNT, failed=COUNT), metadata=nullable(NAMES),
    ),
    "Batches": list_of(ref("Batch"), "first_id", "last_id", "has_more"),
    "Explained": shape(
        None, request_id=TEXT, asked_id=TEXT, router=TEXT, tenant=TEXT, model=TEXT, context_class=TEXT,
        adapter=TEXT, priority={"type": "integer"}, prompt_tokens=COUNT, max_tokens=COUNT,
        slo={"type": "object"}, session=TEXT, state={"enum": ["over", "running"]},
        choices=items({"type": "object"}),
    ),
    "Status": shape(None, status=TEXT),
    "Ready": shape(None, status={"const": "ready"}, models=items(TEXT)),
    "Version": shape(None, version=TEXT),
    "ProtocolServer": shape(None, name=TEXT, version=TEXT, extensions=items(TEXT)),
    "ProtocolModel": shape(
        None, name=TEXT, versions=items(TEXT), platform=TEXT, inputs=items(_TENSOR_KIND),
        outputs=items(_TENSOR_KIND),
    ),
    "ProtocolIndex": items(shape(None, name=TEXT, version=TEXT, state=TEXT)),
    "ProtocolLive": shape(None, live=FLAG),
    "ProtocolReady": shape(None, ready=FLAG),
    "Inferred": shape(None, ("id",), model_name=TEXT, model_version=TEXT, id=TEXT, outputs=items(_TENSOR)),
    "Generated": shape(
        None, model_name=TEXT, model_version=TEXT, text_output={"anyOf": [TEXT, items(TEXT)]}
    ),
    "Error": shape(None, error=_ERROR),
    "AnthropicError": shape(
        None, type={"const": "error"},
        error=shape(None, ("param", "details"), type=TEXT, message=TEXT, param=TEXT, details={"type": "object"}),
    ),
    "ProtocolError": shape(None, error={"anyOf": [TEXT, _ERROR]}),
}  # fmt: skip

# What a 200 holds; a model's endpoints of the Open Inference Protocol are found by their path's end.
ANSWERS: dict[tuple[str, str], str] = {
    ("post", "/v1/completions"): "Completion",
    ("post", "/v1/chat/completions"): "ChatCompletion",
    ("post", "/v1/responses"): "Response",
    ("post", "/v1/messages"): "Message",
    ("post", "/v1/messages/count_tokens"): "CountedTokens",
    ("post", "/v1/embeddings"): "Embeddings",
    **{("post", path): "Reranked" for path in ("/v1/rerank", "/rerank", "/v2/rerank")},
    **{("post", path): "Scored" for path in ("/v1/score", "/score")},
    ("get", "/v1/models"): "Models",
    ("get", "/v1/models/{model_id}"): "Model",
    ("post", "/v1/load_lora_adapter"): "AdapterChanged",
    ("post", "/v1/unload_lora_adapter"): "AdapterChanged",
    ("get", "/v1/adapters"): "Adapters",
    ("post", "/v1/cache/prefixes"): "PinnedPrefix",
    ("get", "/v1/cache/prefixes"): "PinnedPrefixes",
    ("delete", "/v1/cache/prefixes/{pin}"): "DeletedPrefix",
    ("post", "/tokenize"): "Tokenized",
    ("post", "/detokenize"): "Detokenized",
    ("post", "/v1/files"): "File",
    ("get", "/v1/files"): "Files",
    ("get", "/v1/files/{file_id}"): "File",
    ("delete", "/v1/files/{file_id}"): "DeletedFile",
    ("post", "/v1/batches"): "Batch",
    ("get", "/v1/batches"): "Batches",
    ("get", "/v1/batches/{job_id}"): "Batch",
    ("post", "/v1/batches/{job_id}/cancel"): "Batch",
    ("get", "/v1/requests/{request_id}/explain"): "Explained",
    ("get", "/health"): "Status",
    ("get", "/ready"): "Ready",
    ("get", "/version"): "Version",
    ("get", "/v2"): "ProtocolServer",
    ("get", "/v2/health/live"): "ProtocolLive",
    ("get", "/v2/health/ready"): "ProtocolReady",
    ("post", "/v2/repository/index"): "ProtocolIndex",
}
MODEL_ANSWERS = {"/infer": "Inferred", "/generate": "Generated", "/ready": "ProtocolReady"}
# Of a stream: what an event's data holds, the error that may come instead, and what ends it.
EVENTS = {
    "/v1/completions": ("CompletionChunk", "Error", "[DONE]"),
    "/v1/chat/completions": ("ChatCompletionChunk", "Error", "[DONE]"),
    "/v1/responses": ("", "", ""),
    "/v1/messages": ("", "", ""),
    "/v1/cluster/stream": ("", "", ""),
    "/generate_stream": ("Generated", "ProtocolError", ""),
}


def event_of(path: str) -> Json | None:
    """Returns the JSON Schema of one server-sent event of the stream at ``path``, in OpenAPI 3.2's form; None if
    ``path`` doesn't stream.
    """
    found = EVENTS.get("/generate_stream" if path.endswith("/generate_stream") else path)
    if found is None:
        return None
    name, error, last = found
    data: Json = {"type": "string", "contentMediaType": "application/json"}
    if name:
        data["contentSchema"] = {"anyOf": [ref(name), ref(error)]}
    if last:
        data = {"anyOf": [{"const": last}, data]}
    return {"type": "object", "required": ["data"], "properties": {"event": TEXT, "data": data}}


def schema_of(method: str, path: str) -> Json:
    """Returns the JSON Schema of a 200 response; {} (anything) if none is declared."""
    name = ANSWERS.get((method, path))
    if name is None and path.startswith("/v2/models/"):
        name = next((of for end, of in MODEL_ANSWERS.items() if path.endswith(end)), "ProtocolModel")
    return {} if name is None else ref(name)
