"""The REST surface as one ASGI application: routes, errors in OpenAI's shape, request ids.

Knows nothing of sockets or processes.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from baton.protos.errors import BatonError
from baton.protos.version import product_version
from baton.router.answer.generation import Frontend
from baton.router.api.batch.routes import batch_routes
from baton.router.api.border import Border
from baton.router.api.errors import error_response, plain_error
from baton.router.api.open_inference.rest import open_inference_routes
from baton.router.api.openai.embeddings import embeddings_routes
from baton.router.api.openai.routes import openai_routes
from baton.router.api.openapi import describe
from baton.router.api.operator.cluster import cluster_routes, page_routes
from baton.router.api.operator.explain import explain_routes
from baton.router.api.operator.roles import roles_routes
from baton.router.api.operator.service import model_routes, ops_routes
from baton.router.api.responses.routes import responses_routes

_CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(frontend: Frontend, registry: CollectorRegistry) -> ASGIApp:
    """The application. ``registry`` is what /metrics shows."""
    app = FastAPI(title="Baton", version=product_version(), redirect_slashes=False)
    surfaces = (
        openai_routes,
        responses_routes,
        embeddings_routes,
        batch_routes,
        model_routes,
        explain_routes,
        roles_routes,
        cluster_routes,
        open_inference_routes,
    )
    for routes in (*(surface(frontend) for surface in surfaces), ops_routes(frontend, registry)):
        app.include_router(routes)
    app.include_router(page_routes())
    app.add_exception_handler(BatonError, _ours)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _unknown)
    describe(app)
    return Border(app, frontend)


async def _ours(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = _CODES.get(error.status_code, "http_error")
    return plain_error(error.status_code, message, code, dict(error.headers or {}))


async def _unknown(request: Request, error: Exception) -> Response:
    return error_response(error)
