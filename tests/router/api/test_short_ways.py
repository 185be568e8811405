"""The ways to endpoints: FastAPI's routes are for the document, plain ones are taken."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from baton.router.api.app import app_of


def routes() -> APIRouter:
    found = APIRouter()

    @found.post("/plain")
    async def plain(request: Request) -> Response:
        return PlainTextResponse(type(request.scope["route"]).__name__ if "route" in request.scope else "Route")

    @found.get("/plain")
    async def read(request: Request) -> Response:
        return PlainTextResponse("read")

    @found.get("/named/{name}")
    async def named(name: str) -> dict[str, str]:
        return {"name": name}

    return found


def test_an_endpoint_that_takes_the_request_alone_is_reached_without_fastapi() -> None:
    app = app_of(routes())
    assert [route.path for route in app.router.routes if type(route) is Route and route.path == "/plain"] == [
        "/plain"
    ] * 2
    client = TestClient(app)
    assert client.post("/plain").text == "Route"
    assert client.get("/plain").text == "read"
    assert client.get("/named/x").json() == {"name": "x"}


def test_methods_and_the_document_are_those_of_the_declared_routes() -> None:
    app = app_of(routes())
    client = TestClient(app)
    refused = client.put("/plain")
    assert refused.status_code == 405
    assert client.head("/plain").status_code == 405
    assert set(client.get("/openapi.json").json()["paths"]) == {"/plain", "/named/{name}"}
    assert any(isinstance(route, APIRoute) for route in routes().routes)
