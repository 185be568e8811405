"""The REST surface as one ASGI application: routes, errors, request ids.

Knows nothing of sockets or processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from baton.protos.errors import BatonError
from baton.protos.version import product_version
from baton.router.api.access import AccessMiddleware
from baton.router.api.anthropic.routes import messages_routes
from baton.router.api.api_document import describe
from baton.router.api.batch.routes import batch_routes
from baton.router.api.error_wording import error_at, http_error_at
from baton.router.api.open_inference.rest import open_inference_routes
from baton.router.api.openai.embeddings import embeddings_routes
from baton.router.api.openai.routes import openai_routes
from baton.router.api.operator.adapters import adapter_routes
from baton.router.api.operator.cluster import cluster_routes, page_routes
from baton.router.api.operator.explain import explain_routes
from baton.router.api.operator.prefixes import prefix_routes
from baton.router.api.operator.roles import roles_routes
from baton.router.api.operator.service import model_routes, ops_routes
from baton.router.api.rerank import rerank_routes
from baton.router.api.responses.routes import responses_routes
from baton.router.api.surfaces import Surfaces

_CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(surfaces: Surfaces) -> ASGIApp:
    """Returns the ASGI application: every REST route, behind the middleware that identifies callers."""
    generation = surfaces.generation
    app = app_of(
        openai_routes(generation),
        responses_routes(generation),
        messages_routes(generation),
        embeddings_routes(generation),
        rerank_routes(generation),
        batch_routes(surfaces.batch),
        model_routes(generation),
        explain_routes(generation.quotas.decisions),
        roles_routes(surfaces.roles),
        adapter_routes(surfaces.adapters, generation.catalog),
        prefix_routes(surfaces.prefixes, generation),
        cluster_routes(surfaces.cluster),
        open_inference_routes(generation),
        ops_routes(generation.serving, generation.catalog, surfaces.exposition),
        page_routes(),
    )
    describe(app)
    return AccessMiddleware(app, surfaces.access)


def app_of(*routers: APIRouter) -> FastAPI:
    """Returns an application of ``routers`` that words errors as each endpoint's clients expect."""
    app = FastAPI(title="Baton", version=product_version(), redirect_slashes=False)
    # Not by include_router, which has the first request build each route a second time (fastapi 0.165).
    app.router.routes += [route for routes in routers for route in routes.routes]
    app.router.routes[:0] = [short for routes in routers for short in _short_ways(routes)]
    app.add_exception_handler(BatonError, _ours)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _unknown)
    return app


def _short_ways(routes: APIRouter) -> Iterator[Route]:
    """Yields routes straight to those endpoints that take the request and return the response themselves.

    FastAPI's own route to such an endpoint takes 27 to 85 us of CPU more (fastapi 0.165); it stays for the API's
    document.
    """
    for route in routes.routes:
        if not isinstance(route, APIRoute) or "{" in route.path:
            continue
        found = inspect.signature(route.endpoint, eval_str=True)
        if [p.annotation for p in found.parameters.values()] == [Request] and found.return_annotation is Response:
            short = Route(route.path, route.endpoint, include_in_schema=False)
            short.methods = set(route.methods or ())  # those alone: Starlette adds HEAD to GET
            yield short


async def _ours(request: Request, error: Exception) -> Response:
    return error_at(request.url.path, error)


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = _CODES.get(error.status_code, "http_error")
    return http_error_at(request.url.path, error.status_code, message, code, dict(error.headers or {}))


async def _unknown(request: Request, error: Exception) -> Response:
    return error_at(request.url.path, error)
