"""The OpenAPI document: bodies that are read by hand, errors as they are, streams and plain text where they come.

Knows nothing of what endpoints do. FastAPI knows the paths; the rest is told here, once.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from baton.router.batch_api import BatchBody
from baton.router.body import SCHEMA_REF, Body
from baton.router.embeddings_api import EmbeddingsBody
from baton.router.open_inference_rest import GenerateBody, InferBody
from baton.router.responses_schemas import ResponsesBody
from baton.router.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

Json = dict[str, Any]
BODIES: tuple[type[Body], ...] = (
    CompletionBody,
    ChatBody,
    ResponsesBody,
    EmbeddingsBody,
    BatchBody,
    TokenizeBody,
    DetokenizeBody,
    InferBody,
    GenerateBody,
)
ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
PROTOCOL_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"anyOf": [{"type": "string"}, ERROR["properties"]["error"]]}},
}
STREAM = "text/event-stream"
MEDIA = {
    "/v1/completions": ("application/json", STREAM),
    "/v1/chat/completions": ("application/json", STREAM),
    "/v1/responses": ("application/json", STREAM),
    "/v1/files/{file_id}/content": ("application/octet-stream",),
    "/metrics": ("text/plain",),
}
INFER_MEDIA = ("application/json", "application/octet-stream")


def describe(app: FastAPI) -> None:
    """Make ``app``'s document complete."""
    _, found = models_json_schema([(body, "validation") for body in BODIES], ref_template=SCHEMA_REF)
    generated = app.openapi

    def openapi() -> Json:
        document = generated()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own: our errors have another shape
            schemas.pop(name, None)
        schemas.update(found["$defs"] | {"Error": ERROR, "ProtocolError": PROTOCOL_ERROR})
        for path, operations in document["paths"].items():
            for operation in operations.values():
                _describe(path, operation)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _describe(path: str, operation: Json) -> None:
    is_protocol = path.startswith("/v2")
    schema = {"$ref": SCHEMA_REF.format(model="ProtocolError" if is_protocol else "Error")}
    responses = operation["responses"]
    responses.pop("422", None)
    responses["default"] = {"description": "What went wrong", "content": {"application/json": {"schema": schema}}}
    responses["200"]["content"] = {media: {"schema": {}} for media in _media(path)}
    _name_once(operation)


def _media(path: str) -> tuple[str, ...]:
    if path.endswith("/infer"):
        return INFER_MEDIA
    if path.endswith("/generate_stream"):
        return (STREAM,)
    return MEDIA.get(path, ("application/json",))


def _name_once(operation: Json) -> None:
    """A path parameter that is declared by FastAPI and by us is one."""
    seen: dict[tuple[str, str], Json] = {}
    for parameter in operation.get("parameters", ()):
        seen[parameter["name"], parameter["in"]] = parameter
    if seen:
        operation["parameters"] = list(seen.values())
