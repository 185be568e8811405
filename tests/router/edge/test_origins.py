"""Tests which web pages may use the router: rebound names and foreign origins without keys, CORS with its rules."""

from __future__ import annotations

import httpx
import pytest
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from baton.cluster.config import RouterConfig
from baton.router.api.errors import json_response
from baton.router.edge.origins import host_of, is_loopback
from baton.router.server import for_pages

PAGE = "https://app.example"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await json_response({}, headers={"x-request-id": "1"})(scope, receive, send)


def client(open_to_all: bool = True, **settings: object) -> httpx.AsyncClient:
    made = for_pages(RouterConfig(**settings), app, open_to_all)
    return httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://127.0.0.1:8000")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9:1", "localhost:8000", "LOCALHOST", "a.localhost", "[::1]:80"]
)
async def test_loopback_names_are_served(host: str) -> None:
    async with client() as http:
        assert (await http.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "10.0.0.1", "[::1", "", "localhost.evil.example"]
)
async def test_a_name_that_was_bent_to_loopback_is_refused_with_the_remedy(host: str) -> None:
    async with client() as http:
        refused = await http.post("/v1/completions", headers={"host": host})
        assert refused.status_code == 421
        assert "router.allowed_hosts" in refused.json()["error"]["message"]
        assert (await http.post("/v1/messages", headers={"host": host})).json()["type"] == "error"
        assert (await http.get("/health", headers={"host": host})).status_code == 200


async def test_configured_names_and_routers_with_keys_or_beyond_loopback_are_not_asked() -> None:
    for http in (
        client(allowed_hosts=("Box.example",)),
        client(open_to_all=False),
        client(host="0.0.0.0", insecure=True),
    ):
        async with http:
            assert (await http.get("/v1/models", headers={"host": "box.example"})).status_code == 200


async def test_a_foreign_page_cannot_post_blindly_to_a_router_without_keys() -> None:
    async with client() as http:
        for origin in (PAGE, "null", "http://evil.example:8000"):
            refused = await http.post("/v1/cluster/ratio", headers={"origin": origin})
            assert refused.status_code == 403
            assert "router.cors_origins" in refused.json()["error"]["message"]
        for origin in ("http://127.0.0.1:8000", "http://localhost:3000"):
            assert (await http.post("/v1/cluster/ratio", headers={"origin": origin})).status_code == 200
    async with client(cors_origins=(PAGE,)) as http:
        assert (await http.post("/v1/completions", headers={"origin": PAGE})).status_code == 200


async def test_there_is_no_cors_unless_asked_for() -> None:
    async with client(open_to_all=False) as http:
        answer = await http.get("/v1/models", headers={"origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers


async def test_preflights_of_listed_origins_are_answered_without_a_key_and_may_bring_credentials() -> None:
    asked = {"origin": PAGE, "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization, content-type"
    async with client(open_to_all=False, cors_origins=(PAGE,)) as http:
        answer = await http.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert answer.headers["access-control-allow-credentials"] == "true"
        got = await http.get("/v1/models", headers={"origin": PAGE})
        assert "x-request-id" in got.headers["access-control-expose-headers"]
        other = await http.options("/v1/chat/completions", headers=asked | {"origin": "https://evil.example"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


async def test_any_origin_gets_no_credentials() -> None:
    async with client(open_to_all=False, cors_origins=("*",)) as http:
        answer = await http.get("/v1/models", headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


def test_an_origin_is_a_scheme_and_a_host() -> None:
    for wrong in ("app.example", "https://app.example/", "https://app.example/path"):
        with pytest.raises(ValidationError, match="is no origin"):
            RouterConfig(cors_origins=(wrong,))


def test_hosts_are_read_from_authorities() -> None:
    assert host_of("[::1]:80") == "::1"
    assert host_of("A.example:x") == "a.example"
    assert not is_loopback("")
