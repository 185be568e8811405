"""What each endpoint answers, as JSON Schemas: the half of the OpenAPI document that no code is generated from.

Knows nothing of how an answer is made; ``tests/router/test_schemathesis.py`` holds the two together.
"""

from __future__ import annotations

from baton.router.access.json import Json

TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
TIME: Json = {"type": "integer", "description": "Unix time in seconds"}
NUMBER: Json = {"type": "number"}
FLAG: Json = {"type": "boolean"}
IDS: Json = {"type": "array", "items": COUNT}
NAMES: Json = {"type": "object", "additionalProperties": TEXT}
REASON: Json = {"enum": ["stop", "length", "tool_calls", None]}
ERROR_TYPES = ["invalid_request_error", "rate_limit_error", "server_error"]


def a(name: str) -> Json:
    """Returns the JSON Schema reference to component ``name`` of the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{name}"}


def many(schema: Json) -> Json:
    """Returns the JSON Schema of an array of ``schema``."""
    return {"type": "array", "items": schema}


def maybe(schema: Json) -> Json:
    """Returns the JSON Schema of a value that is ``schema`` or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def thing(kind: str | None = None, optional: tuple[str, ...] = (), /, **fields: Json) -> Json:
    """Returns the JSON Schema of an object with ``fields``, all required except ``optional``; ``kind`` is its
    constant ``object``.
    """
    named = {} if kind is None else {"object": {"const": kind}}
    required = [*named, *(name for name in fields if name not in optional)]
    return {"type": "object", "required": required, "properties": named | fields}


def listing(of: Json, *more: str) -> Json:
    """Returns the JSON Schema of OpenAI's list object whose entries are ``of``; ``more`` names further keys of any
    type.
    """
    return thing("list", data=many(of), **{name: {} for name in more})


_ADAPTER: Json = {
    "id": TEXT, "parent": TEXT, "root": TEXT, "adapter_id": TEXT, "tenant": TEXT, "pinned": FLAG, "by": TEXT,
    "created": TIME, "workers": many(TEXT),
}  # fmt: skip
_ONE_LOGPROB = {"token": TEXT, "logprob": NUMBER, "bytes": IDS}
_ANSWER: Json = {"id": TEXT, "created": TIME, "model": TEXT}
_CHOICE_EXTRAS: Json = {"token_ids": IDS, "prompt_token_ids": maybe(IDS)}
_COMPLETION_CHOICE = thing(
    None, ("token_ids", "prompt_token_ids", "prompt_logprobs"),
    index=COUNT, text=TEXT, logprobs=maybe(a("CompletionLogprobs")), finish_reason=REASON,
    prompt_logprobs=maybe(many(maybe({"type": "object"}))), **_CHOICE_EXTRAS,
)  # fmt: skip
_CALL = thing(None, id=TEXT, type={"const": "function"}, function=thing(None, name=TEXT, arguments=TEXT))
_CALL_PART = thing(
    None, ("id", "type"), index=COUNT, id=TEXT, type={"const": "function"},
    function=thing(None, ("name",), name=TEXT, arguments=TEXT),
)  # fmt: skip
_MESSAGE = thing(
    None, ("tool_calls", "reasoning_content"),
    role={"const": "assistant"}, content=maybe(TEXT), refusal={"type": "null"}, tool_calls=many(_CALL),
    reasoning_content=TEXT,
)  # fmt: skip
_DELTA = thing(
    None, ("role", "content", "tool_calls", "reasoning_content"),
    role={"const": "assistant"}, content=TEXT, tool_calls=many(_CALL_PART), reasoning_content=TEXT,
)  # fmt: skip
_TENSOR = thing(
    None, ("data", "parameters"), name=TEXT, datatype=TEXT, shape=IDS, data={"type": "array"},
    parameters={"type": "object"},
)  # fmt: skip
_TENSOR_KIND = thing(None, name=TEXT, datatype=TEXT, shape=many({"type": "integer"}))

_ERROR = thing(
    None, message=TEXT, type={"enum": ERROR_TYPES}, param={"type": ["string", "null"]}, code=TEXT
)  # fmt: skip

COMPONENTS: dict[str, Json] = {
    "Usage": thing(
        None, ("completion_tokens_details",), prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT,
        prompt_tokens_details=thing(None, cached_tokens=COUNT),
        completion_tokens_details=thing(None, accepted_prediction_tokens=COUNT, rejected_prediction_tokens=COUNT),
    ),
    "CompletionLogprobs": thing(
        None, tokens=many(TEXT), token_logprobs=many(maybe(NUMBER)), text_offset=IDS,
        top_logprobs=many(maybe({"type": "object", "additionalProperties": NUMBER})),
    ),
    "ChatLogprobs": thing(
        None, refusal={"type": "null"},
        content=many(thing(None, **_ONE_LOGPROB, top_logprobs=many(thing(None, **_ONE_LOGPROB)))),
    ),
    "Completion": thing("text_completion", **_ANSWER, choices=many(_COMPLETION_CHOICE), usage=a("Usage")),
    "CompletionChunk": thing(
        "text_completion", ("usage",), **_ANSWER, choices=many(_COMPLETION_CHOICE), usage=maybe(a("Usage"))
    ),
    "ChatCompletion": thing(
        "chat.completion", ("prompt_token_ids", "prompt_logprobs"), **_ANSWER, usage=a("Usage"),
        choices=many(thing(
            None, ("token_ids",), index=COUNT, message=_MESSAGE, logprobs=maybe(a("ChatLogprobs")),
            finish_reason=REASON, token_ids=IDS,
        )),
        prompt_token_ids=IDS, prompt_logprobs=many(maybe({"type": "object"})),
    ),
    "ChatCompletionChunk": thing(
        "chat.completion.chunk", ("usage", "prompt_token_ids"), **_ANSWER, usage=maybe(a("Usage")),
        choices=many(thing(
            None, ("token_ids",), index=COUNT, delta=_DELTA, logprobs=maybe(a("ChatLogprobs")),
            finish_reason=REASON, token_ids=IDS,
        )),
        prompt_token_ids=IDS,
    ),
    "Response": thing(
        "response", id=TEXT, created_at=TIME, model=TEXT,
        status={"enum": ["completed", "incomplete", "in_progress"]}, error={"type": "null"},
        incomplete_details=maybe(thing(None, reason=TEXT)),
        output=many(thing(None, ("status",), type=TEXT, id=TEXT)),
        parallel_tool_calls=FLAG, previous_response_id={"type": "null"}, store={"const": False},
        usage=maybe(thing(
            None, input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT,
            input_tokens_details=thing(None, cached_tokens=COUNT),
            output_tokens_details=thing(None, reasoning_tokens=COUNT),
        )),
        metadata=NAMES, tools={"type": "array"}, text={"type": "object"},
    ),
    "Embeddings": thing(
        "list", model=TEXT, usage=thing(None, prompt_tokens=COUNT, total_tokens=COUNT),
        data=many(thing("embedding", index=COUNT, embedding={"anyOf": [many(NUMBER), TEXT]})),
    ),
    "Reranked": thing(
        None, id=TEXT, model=TEXT, usage=thing(None, prompt_tokens=COUNT, total_tokens=COUNT),
        results=many(thing(
            None, ("document",), index=COUNT, relevance_score=NUMBER, document=thing(None, text=TEXT),
        )),
    ),
    "Scored": thing(
        "list", id=TEXT, created=TIME, model=TEXT, data=many(thing("score", index=COUNT, score=NUMBER)),
        usage=thing(None, prompt_tokens=COUNT, total_tokens=COUNT, completion_tokens=COUNT),
    ),
    "Model": thing(
        "model", id=TEXT, created=TIME, owned_by=TEXT, root=TEXT, parent=maybe(TEXT), max_model_len=COUNT
    ),
    "Adapter": thing("adapter", **_ADAPTER),
    "AdapterChanged": thing("adapter", message=TEXT, **_ADAPTER),
    "Adapters": listing(a("Adapter")),
    "PinnedPrefix": thing(
        "cache.prefix",
        id=TEXT,
        model=TEXT,
        tokens=COUNT,
        tenant=TEXT,
        created=TIME,
        expires_at=TIME,
        workers=many(thing(None, worker=TEXT, tokens=COUNT)),
        lost_workers=many(TEXT),
    ),
    "PinnedPrefixes": listing(a("PinnedPrefix")),
    "DeletedPrefix": thing("cache.prefix", id=TEXT, deleted={"const": True}),
    "Models": listing(a("Model")),
    "Tokenized": thing(
        None, ("token_strs",), count=COUNT, max_model_len=COUNT, tokens=IDS, token_strs=many(TEXT)
    ),
    "Detokenized": thing(None, prompt=TEXT),
    "File": thing("file", id=TEXT, bytes=COUNT, created_at=TIME, filename=TEXT, purpose=TEXT, status=TEXT),
    "Files": listing(a("File"), "first_id", "last_id", "has_more"),
    "DeletedFile": thing("file", id=TEXT, deleted={"const": True}),
    "Batch": thing(
        "batch", id=TEXT, endpoint=TEXT, input_file_id=TEXT, completion_window=TEXT, created_at=TIME,
        status={"enum": [
            "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled",
        ]},
        errors=maybe(listing({})), output_file_id=maybe(TEXT), error_file_id=maybe(TEXT), expires_at=TIME,
        request_counts=thing(None, total=COUNT, completed=COUNT, failed=COUNT), metadata=maybe(NAMES),
    ),
    "Batches": listing(a("Batch"), "first_id", "last_id", "has_more"),
    "Explained": thing(
        None, request_id=TEXT, asked_id=TEXT, router=TEXT, tenant=TEXT, model=TEXT, context_class=TEXT,
        adapter=TEXT, priority={"type": "integer"}, prompt_tokens=COUNT, max_tokens=COUNT,
        slo={"type": "object"}, session=TEXT, state={"enum": ["over", "running"]}, choices=many({"type": "object"}),
    ),
    "Status": thing(None, status=TEXT),
    "Ready": thing(None, status={"const": "ready"}, models=many(TEXT)),
    "Version": thing(None, version=TEXT),
    "ProtocolServer": thing(None, name=TEXT, version=TEXT, extensions=many(TEXT)),
    "ProtocolModel": thing(
        None, name=TEXT, versions=many(TEXT), platform=TEXT, inputs=many(_TENSOR_KIND), outputs=many(_TENSOR_KIND)
    ),
    "ProtocolIndex": many(thing(None, name=TEXT, version=TEXT, state=TEXT)),
    "ProtocolLive": thing(None, live=FLAG),
    "ProtocolReady": thing(None, ready=FLAG),
    "Inferred": thing(None, ("id",), model_name=TEXT, model_version=TEXT, id=TEXT, outputs=many(_TENSOR)),
    "Generated": thing(
        None, model_name=TEXT, model_version=TEXT, text_output={"anyOf": [TEXT, many(TEXT)]}
    ),
    "Error": thing(None, error=_ERROR),
    "ProtocolError": thing(None, error={"anyOf": [TEXT, _ERROR]}),
}  # fmt: skip

# What a 200 holds; a model's endpoints of the Open Inference Protocol are found by their path's end.
ANSWERS: dict[tuple[str, str], str] = {
    ("post", "/v1/completions"): "Completion",
    ("post", "/v1/chat/completions"): "ChatCompletion",
    ("post", "/v1/responses"): "Response",
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
        data["contentSchema"] = {"anyOf": [a(name), a(error)]}
    if last:
        data = {"anyOf": [{"const": last}, data]}
    return {"type": "object", "required": ["data"], "properties": {"event": TEXT, "data": data}}


def schema_of(method: str, path: str) -> Json:
    """Returns the JSON Schema of a 200 response; {} (anything) if none is declared."""
    name = ANSWERS.get((method, path))
    if name is None and path.startswith("/v2/models/"):
        name = next((of for end, of in MODEL_ANSWERS.items() if path.endswith(end)), "ProtocolModel")
    return {} if name is None else a(name)
