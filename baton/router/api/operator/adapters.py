"""Operators' REST endpoints for LoRA adapters: ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter`` with
vLLM's bodies.

Knows nothing of how an adapter is loaded. With API keys, an admin key is needed; on a router that can be reached
from outside and requires no keys, they are off.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from baton.cluster.adapters import AdapterEntry
from baton.protos.errors import Forbidden, InvalidRequest
from baton.protos.json import Json
from baton.router.access.caller import CALLER
from baton.router.api.body import Body, body_docs
from baton.router.api.errors import json_response
from baton.router.api.large import parsed
from baton.router.api.limits import read_body
from baton.router.api.operator.cluster import require_same_site
from baton.router.api.surfaces import AdapterSurface
from baton.router.text.catalog import ModelCatalog

_Name = Annotated[str, Field(max_length=256, description="the name that clients say as `model`")]


class AdapterBody(Body):
    """Refuses unknown fields, because a misspelled ``tenant`` would serve an adapter to everybody."""

    model_config = ConfigDict(extra="forbid")


class LoadAdapterBody(AdapterBody):
    """Describes an adapter to serve: PEFT's two files in the folder ``lora_path`` beneath adapters.root.

    ``load_inplace`` replaces another content of the name. ``base_model_name`` may be left out if one model is
    served. Not vLLM's: ``pinned`` (workers never evict it) and ``tenant`` (only its keys may use it).
    """

    lora_name: _Name
    lora_path: Annotated[str, Field(max_length=1024)]
    load_inplace: bool = False
    base_model_name: str | None = None
    is_3d_lora_weight: bool | None = None
    pinned: bool = False
    tenant: Annotated[str, Field(max_length=64)] = ""


class UnloadAdapterBody(AdapterBody):
    """Names an adapter to stop serving; requests in flight end on it.

    ``lora_int_id`` is accepted as in vLLM and ignored.
    """

    lora_name: _Name
    lora_int_id: int | None = None


def adapter_routes(surface: AdapterSurface | None, catalog: ModelCatalog) -> APIRouter:
    """Returns the routes of loading, unloading and listing adapters."""
    routes = APIRouter()

    @routes.post("/v1/load_lora_adapter", openapi_extra=body_docs(LoadAdapterBody))
    async def load(request: Request) -> Response:
        """Answered when every worker that can be reached has read the files; the name is served from then on."""
        given = _allowed(surface, request)
        body = await parsed(LoadAdapterBody, await read_body(request, given.max_body_bytes))
        if body.is_3d_lora_weight:
            raise InvalidRequest("adapters of stacked experts are not served: leave it out", "is_3d_lora_weight")
        base = await catalog.resolve(body.base_model_name or "")
        asked = AdapterEntry(
            body.lora_name, base.model_id, body.lora_path, tenant=body.tenant, pinned=body.pinned, by=_who()
        )
        entry = await given.control.add(asked, body.load_inplace)
        return json_response(_told(given, entry, "added"))

    @routes.post("/v1/unload_lora_adapter", openapi_extra=body_docs(UnloadAdapterBody))
    async def unload(request: Request) -> Response:
        """Answered when the name is served no more; its memory is free once the last request on it has ended."""
        given = _allowed(surface, request)
        body = await parsed(UnloadAdapterBody, await read_body(request, given.max_body_bytes))
        entry = await given.control.remove(body.lora_name, _who())
        return json_response(_told(given, entry, "removed"))

    @routes.get("/v1/adapters")
    async def adapters() -> Response:
        """Every adapter that is served, with its content and who holds it."""
        _require_admin()
        served = surface.control.registry.served() if surface is not None else {}
        listed = [_entry(surface, entry) for entry in served.values()] if surface is not None else []
        return json_response({"object": "list", "data": listed})

    return routes


def _allowed(surface: AdapterSurface | None, request: Request) -> AdapterSurface:
    _require_admin()
    require_same_site(request)
    if surface is None:
        raise Forbidden("this router is not part of a cluster whose adapters can be changed")
    if surface.off:
        raise Forbidden(f"loading adapters is off: {surface.off}", "adapters.root")
    return surface


def _require_admin() -> None:
    key = CALLER.get().key
    if key is not None and not key.admin:
        raise Forbidden("adapters are listed, loaded and unloaded with keys made with --admin", "authorization")


def _told(surface: AdapterSurface, entry: AdapterEntry, what: str) -> Json:
    return {"message": f"Success: LoRA adapter '{entry.name}' {what} successfully."} | _entry(surface, entry)


def _entry(surface: AdapterSurface, entry: AdapterEntry) -> Json:
    return {
        "id": entry.name,
        "object": "adapter",
        "parent": entry.model_id,
        "root": entry.path,
        "adapter_id": entry.adapter_id,
        "tenant": entry.tenant,
        "pinned": entry.pinned,
        "by": entry.by,
        "created": int(entry.at),
        "workers": surface.control.holders(entry),
    }


def _who() -> str:
    return CALLER.get().tenant or "operator"
