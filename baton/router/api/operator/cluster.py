"""Operators' REST endpoints for the cluster: ``/v1/cluster`` (once, or as a stream), drain and eject, and the
dashboard.

Knows nothing of how the figures are computed. With API keys, figures and actions need an admin key; the dashboard's
own files hold no data and are open. Against cross-site requests, an action needs a JSON body, and requests that a
browser marks as cross-site are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from importlib.resources import files
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response, StreamingResponse

from baton.cluster.holds import SlotHold
from baton.protos.errors import Forbidden, InvalidRequest, Unauthenticated, Unavailable, WorkerUnknown
from baton.protos.json import Json
from baton.router.access.caller import CALLER
from baton.router.access.gate import AccessGate
from baton.router.access.keys import ApiKey
from baton.router.api.body import Body, body_docs
from baton.router.api.errors import json_response
from baton.router.api.large import parsed
from baton.router.api.limits import read_body
from baton.router.api.surfaces import ClusterSurface
from baton.router.observe.overview import Overview
from baton.router.workers.roster import RosterEntry

STREAM_S = 1.0  # seconds between two events of the stream
PAGE = "/dashboard"
MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class HoldBody(Body):
    """Takes a worker out of rotation: with ``drain`` it gets no new requests and finishes its own.

    ``eject``: its requests move to other workers. ``none``: puts it back.
    """

    hold: Annotated[Literal["drain", "eject", "none"], Field(description="drain, eject or none")]


def cluster_routes(surface: ClusterSurface) -> APIRouter:
    """Returns the routes of the cluster's figures and of holding workers (drain, eject)."""
    routes = APIRouter()

    @routes.get("/v1/cluster")
    async def cluster() -> Response:
        """Returns every figure of the cluster at this moment."""
        return json_response(await _overview(surface).snapshot(), headers={"cache-control": "no-store"})

    @routes.get("/v1/cluster/stream")
    async def stream() -> Response:
        """Streams the same as server-sent events, one a second, until the caller's key is no admin's any more."""
        events = _events(_overview(surface), surface.gate, CALLER.get().key)
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    @routes.post("/v1/workers/{slot}/hold", openapi_extra=body_docs(HoldBody))
    async def hold(slot: str, request: Request) -> Response:
        """Take a worker out of the rotation, or put it back; every router heeds it within a second."""
        require_admin()
        require_same_site(request)
        body = await parsed(HoldBody, await read_body(request, surface.max_body_bytes))
        return json_response(await _hold(surface, slot, body.hold))

    return routes


def page_routes() -> APIRouter:
    """Returns the routes of the dashboard's files, which are read from the package once; ``/`` leads there."""
    routes, folder = APIRouter(include_in_schema=False), files("baton.router") / "dashboard"
    found = {
        entry.name: (entry.read_bytes(), MEDIA["." + entry.name.rpartition(".")[2]])
        for entry in folder.iterdir()
        if "." + entry.name.rpartition(".")[2] in MEDIA
    }

    @routes.get("/")
    async def home() -> Response:
        return RedirectResponse(PAGE + "/", 307)

    @routes.get(PAGE)
    async def page() -> Response:
        return RedirectResponse(PAGE + "/", 308)

    @routes.get(PAGE + "/{name:path}")
    async def file(name: str) -> Response:
        content = found.get(name or "index.html")
        if content is None:
            raise HTTPException(404, "no such file")
        return Response(content[0], media_type=content[1], headers=HEADERS)

    return routes


async def _events(overview: Overview, gate: AccessGate, key: ApiKey | None) -> AsyncIterator[bytes]:
    while _is_admin_still(gate, key):
        yield b"data: " + orjson.dumps(await overview.snapshot()) + b"\n\n"
        await asyncio.sleep(STREAM_S)


def _is_admin_still(gate: AccessGate, key: ApiKey | None) -> bool:
    try:
        now = gate.current(key)
    except Unauthenticated:
        return False
    return now is None or now.admin


async def _hold(surface: ClusterSurface, slot: str, how: str) -> Json:
    if surface.roster is None:
        raise Unavailable("this router is not part of a cluster whose workers can be held")
    roster = surface.roster
    workers = roster.snapshot()
    if slot not in workers and slot not in roster.holds:
        names = ", ".join(sorted(workers)) or "none"
        raise WorkerUnknown(f"no worker {slot!r} here; there is {names}", "worker")
    if how == "none":
        await roster.store.put(slot, None)
    else:
        _require_another(workers, slot)
        by = CALLER.get().tenant or "operator"
        await roster.store.put(slot, SlotHold("drain" if how == "drain" else "eject", by, surface.wall_clock()))
    after = (await roster.refresh()).get(slot)
    if surface.overview is not None:
        surface.overview.outdated()
    return {"worker": slot, "hold": how, "state": after.info.state if after else "absent"}


def _require_another(workers: Mapping[str, RosterEntry], slot: str) -> None:
    """The last decode worker of a model stays: without it nothing could be answered."""
    leaving = workers.get(slot)
    if leaving is None or leaving.info.role != "decode":
        return
    rest = [e.info for name, e in workers.items() if name != slot and e.info.model_id == leaving.info.model_id]
    if not any(info.role == "decode" and info.state == "ready" for info in rest):
        raise InvalidRequest(
            f"{slot} is the only decode worker of {leaving.info.model_id!r} that is ready", "worker"
        )


def _overview(surface: ClusterSurface) -> Overview:
    require_admin()
    if surface.overview is None:
        raise Unavailable("this router shows no cluster: telemetry is off (telemetry.enabled)")
    return surface.overview


def require_admin() -> None:
    """Raises Forbidden if the caller has an API key that is no admin's."""
    key = CALLER.get().key
    if key is not None and not key.admin:
        raise Forbidden("the cluster is for keys made with --admin", "authorization")


def require_same_site(request: Request) -> None:
    """Raises Forbidden for a request that a browser marks as cross-site, InvalidRequest for a body that is not
    declared as JSON.
    """
    site = request.headers.get("sec-fetch-site", "none")
    if site not in ("same-origin", "none"):
        raise Forbidden("this comes from another site's page", "sec-fetch-site")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequest("send the action as JSON (content-type: application/json)", "content-type")
