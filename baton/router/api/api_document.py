"""Completes FastAPI's OpenAPI document with what it can't know: bodies, errors, streams and plain-text answers.

Knows nothing of what endpoints do.
"""

from __future__ import annotations

import asyncio
import functools

import orjson
from fastapi import FastAPI, Request
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from baton.protos.json import Json
from baton.router.api.anthropic.errors import is_messages_path
from baton.router.api.anthropic.schemas import CountTokensBody, MessagesBody
from baton.router.api.batch.routes import BatchBody
from baton.router.api.body import SCHEMA_REF, Body
from baton.router.api.open_inference.rest import GenerateBody, InferBody
from baton.router.api.openai.embeddings import EmbeddingsBody
from baton.router.api.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from baton.router.api.openapi_answers import COMPONENTS, event_of, schema_of
from baton.router.api.operator.adapters import LoadAdapterBody, UnloadAdapterBody
from baton.router.api.operator.cluster import HoldBody
from baton.router.api.operator.prefixes import PrefixBody
from baton.router.api.operator.roles import RatioBody, RoleBody
from baton.router.api.rerank import RerankBody, ScoreBody
from baton.router.api.responses.schemas import ResponsesBody

BODIES: tuple[type[Body], ...] = (
    CompletionBody,
    ChatBody,
    ResponsesBody,
    MessagesBody,
    CountTokensBody,
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
    BatchBody,
    TokenizeBody,
    DetokenizeBody,
    InferBody,
    GenerateBody,
    RoleBody,
    RatioBody,
    HoldBody,
    LoadAdapterBody,
    PrefixBody,
    UnloadAdapterBody,
)
PROBLEMS = {
    400: "Something in the request is wrong: `param` names it",
    401: "No API key, or one that opens nothing",
    403: "The key is good, but not for this",
    404: "There is nothing of that name",
    409: "The name is taken, or its files have changed",
    413: "The body is over router.max_body_bytes",
    429: "Overload or a rate that is used up: come back after Retry-After (retry-after-ms)",
    500: "A defect of the server",
    503: "Nobody can answer now: come back after Retry-After (retry-after-ms)",
    504: "The deadline passed before the answer was complete",
}
OPEN = ("/health", "/ready", "/version", "/metrics")  # as access.OPEN_PATHS
GENERATING = (
    "completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "rerank", "score", "/infer", "/generate",
    "/generate_stream",
)  # fmt: skip
TOKENIZING = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
STREAM = "text/event-stream"
BINARY: Json = {"type": "string", "format": "binary"}
KEYS: Json = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "as Anthropic does"},
}
CALL_HEADERS = {
    "x-session-id": ("the conversation: its turns go to the same decode worker", {"maxLength": 256}),
    "x-request-id": ("the caller's own name of the call: echoed, and known to explain", {"maxLength": 128}),
}


def describe(app: FastAPI) -> None:
    """Makes ``app``'s OpenAPI document complete: bodies, errors, headers, event streams.

    It is built once, in a thread, when first asked for.
    """
    generated = app.openapi

    def openapi() -> Json:
        document = generated()
        components = document.setdefault("components", {})
        components["securitySchemes"] = KEYS
        schemas = components.setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own: our errors have another shape
            schemas.pop(name, None)
        schemas.update(_bodies() | COMPONENTS)
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                _describe(method, path, operation)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    written = functools.cache(lambda: orjson.dumps(openapi()))

    async def document(request: Request) -> Response:
        """Made once, in a thread: it takes some 50 ms."""
        return Response(await asyncio.to_thread(written), media_type="application/json")

    routes = app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", "") != app.openapi_url]
    app.add_route(str(app.openapi_url), document, include_in_schema=False)


@functools.cache
def _bodies() -> Json:
    """Returns every body's schema by name, made when somebody first asks for the document, because it takes a
    while.
    """
    _, found = models_json_schema([(body, "validation") for body in BODIES], ref_template=SCHEMA_REF)
    return dict(found["$defs"])


def _error_of(path: str) -> str:
    """Returns the name of the schema of an endpoint's errors."""
    if is_messages_path(path):
        return "AnthropicError"
    return "ProtocolError" if _is_open_inference(path) else "Error"


def _is_open_inference(path: str) -> bool:
    return path.startswith("/v2") and path != "/v2/rerank"


def _describe(method: str, path: str, operation: Json) -> None:
    error = {"$ref": SCHEMA_REF.format(model=_error_of(path))}
    responses = operation["responses"]
    responses.pop("422", None)
    responses.pop("default", None)
    for status in _problems(path, operation):
        content = {"application/json": {"schema": error}}
        responses[str(status)] = {"description": PROBLEMS[status], "content": content}
        if status in (429, 503):
            responses[str(status)]["headers"] = {
                name: {"schema": {"type": "integer"}} for name in ("retry-after", "retry-after-ms")
            }
    responses["200"] |= {"description": "The answer", "content": _contents(method, path)}
    if path not in OPEN:
        # A key is asked for, in one header or the other, where router.keys_file is set.
        operation["security"] = [{}, *({scheme: []} for scheme in KEYS)]
    if path.endswith(GENERATING):
        operation["parameters"] = [*operation.get("parameters", ()), *_headers()]
        told = ("x-baton-route", "x-baton-ignored")
        responses["200"]["headers"] = {name: {"schema": {"type": "string"}} for name in told}
    _name_once(operation)


def _problems(path: str, operation: Json) -> list[int]:
    """Statuses other than 200 that can come."""
    found = {400, 500}
    if path not in OPEN:
        found |= {401}
    if "{" in path or path in TOKENIZING:
        found |= {404}
    if "requestBody" in operation:
        found |= {413, 429}
    if path.endswith(GENERATING):
        found |= {403, 404, 429, 503, 504}
    if path.startswith(("/v1/workers", "/v1/ratio", "/v1/cluster")):
        found |= {403, 404, 503, 504}
    if path.startswith("/v1/cache"):
        found |= {403, 404, 429, 503, 504}
    if path == "/v1/adapters" or path.endswith("load_lora_adapter"):
        found |= {403, 404, 409, 503, 504}
    if path.startswith(("/v1/files", "/v1/batches")) or path.endswith("/ready"):
        found |= {404, 503}
    if path.startswith(("/v1/models", "/v2/models", *TOKENIZING)):
        found |= {503}  # before the first worker came
    return sorted(found)


def _headers() -> list[Json]:
    return [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"} | limits}
        for name, (text, limits) in CALL_HEADERS.items()
    ]


def _contents(method: str, path: str) -> Json:
    """Returns an endpoint's answers by media type."""
    told: Json = {"application/json": {"schema": schema_of(method, path)}}
    if path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    if path.endswith("/content"):
        return {"application/octet-stream": {"schema": BINARY}}
    if path.endswith("/infer"):
        return told | {"application/octet-stream": {"schema": BINARY}}
    if path.endswith(("/generate_stream", "/stream")):
        told = {}
    event = event_of(path)
    return told if event is None else told | {STREAM: {"schema": event}}


def _name_once(operation: Json) -> None:
    """A path parameter that is declared by FastAPI and by us is one."""
    seen: dict[tuple[str, str], Json] = {}
    for parameter in operation.get("parameters", ()):
        seen[parameter["name"], parameter["in"]] = parameter
    if seen:
        operation["parameters"] = list(seen.values())
