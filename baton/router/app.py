"""The REST surface as one ASGI application: routes, errors in OpenAI's shape, request ids.

Knows nothing of sockets or processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from pydantic.json_schema import models_json_schema
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.protos.errors import BatonError
from baton.router.generation import Frontend, clean_request_id
from baton.router.openai_api import openai_routes
from baton.router.openai_errors import error_response, plain_error
from baton.router.ops_api import model_routes, ops_routes, product_version
from baton.router.schemas import SCHEMA_REF, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(frontend: Frontend, registry: CollectorRegistry) -> ASGIApp:
    """The application. ``registry`` is what /metrics shows."""
    app = FastAPI(title="Baton", version=product_version(), redirect_slashes=False)
    for routes in (openai_routes(frontend), model_routes(frontend), ops_routes(frontend, registry)):
        app.include_router(routes)
    app.add_exception_handler(BatonError, _ours)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _unknown)
    _document_bodies(app)
    return RequestIds(app, frontend.new_id)


class RequestIds:
    """Every response carries ``x-request-id``: the caller's, or a new one."""

    def __init__(self, app: ASGIApp, new_id: Callable[[], str]) -> None:
        self._app = app
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything on; adds the header to the response's start."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = clean_request_id(asked) or self._new_id()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _document_bodies(app: FastAPI) -> None:
    """Bodies are read by hand, under the limit, so FastAPI doesn't know their schemas: /docs shall."""
    bodies = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=SCHEMA_REF)
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generated()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


async def _ours(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = _CODES.get(error.status_code, "http_error")
    return plain_error(error.status_code, message, code, dict(error.headers or {}))


async def _unknown(request: Request, error: Exception) -> Response:
    return error_response(error)
