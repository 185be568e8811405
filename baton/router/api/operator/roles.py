"""Operators' REST endpoints for workers' roles and the prefill:decode ratio: ``/v1/workers/{slot}/role`` and
``/v1/ratio``.

Knows nothing of how a worker changes or how a ratio is chosen. What an operator sets is pinned: the controller
leaves a pinned cluster alone until ``{"ratio": "auto"}`` removes the pin.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from redis.exceptions import RedisError
from starlette.responses import Response

from baton.cluster.advice import AdviceStore, RatioPin, TimelineEntry
from baton.protos.errors import BatonError, Forbidden, InvalidRequest, Unavailable
from baton.protos.json import Json
from baton.router.access.caller import CALLER
from baton.router.api.body import Body, body_docs
from baton.router.api.errors import json_response
from baton.router.api.large import parsed
from baton.router.api.limits import read_body
from baton.router.api.operator.cluster import require_same_site
from baton.router.api.surfaces import RoleSurface
from baton.router.dispatch.role_control import GRACE_S, RoleChange, RoleControl, parse_ratio

TIMELINE_SHOWN = 50  # last changes that ``GET /v1/ratio`` shows


class RoleBody(Body):
    """Describes the role that a worker is to take; ``grace_s``: seconds that prompts it is prefilling may still
    take.

    ``force``: change it even if that leaves a model without a worker of a role.
    """

    role: str
    grace_s: Annotated[float, Field(ge=0, le=600)] = GRACE_S
    force: bool = False


class RatioBody(Body):
    """Describes the ratio of workers to form: ``PREFILL:DECODE``, or ``auto`` to give control back to the
    controller.

    ``grace_s``: seconds that running prefills may still take. ``force``: form it even if that leaves a model
    without a worker of a role.
    """

    ratio: str
    grace_s: Annotated[float, Field(ge=0, le=600)] = GRACE_S
    force: bool = False


def roles_routes(surface: RoleSurface | None) -> APIRouter:
    """Returns the routes that change a worker's role, and show and set the prefill:decode ratio."""
    routes = APIRouter()

    @routes.post("/v1/workers/{slot}/role", openapi_extra=body_docs(RoleBody))
    async def set_role(slot: str, request: Request) -> Response:
        """Answered when the worker serves its new role. No request fails by it; the new ratio is pinned."""
        _require_admin()
        require_same_site(request)
        given = _required(surface)
        body = await parsed(RoleBody, await read_body(request, given.max_body_bytes))
        before = given.control.ratio()
        change = await given.control.set_role(slot, body.role, body.grace_s, body.force)
        await _noted(given, before, given.control.ratio(), [change])
        return json_response(msgspec.to_builtins(change))

    @routes.get("/v1/ratio")
    async def ratio() -> Response:
        """Returns where the cluster is, what is pinned, what the controller says, and what changed lately."""
        _require_admin()
        given = _required(surface)
        return json_response(await shown(given.control, given.store))

    @routes.post("/v1/ratio", openapi_extra=body_docs(RatioBody))
    async def set_ratio(request: Request) -> Response:
        """Form a ratio and pin it, or give the dial back to the controller."""
        _require_admin()
        require_same_site(request)
        given = _required(surface)
        body = await parsed(RatioBody, await read_body(request, given.max_body_bytes))
        return json_response(await _set_ratio(given, body))

    return routes


async def _set_ratio(given: RoleSurface, body: RatioBody) -> Json:
    control, store = given.control, given.store
    before = control.ratio()
    if body.ratio == "auto":
        await _unpin(given, before)
        return await shown(control, store)
    prefill, decode = parse_ratio(body.ratio, sum(before))
    earlier = await _pinned(store)
    pin = RatioPin(prefill, decode, given.wall_clock(), _who())
    if not await store.pin(pin):
        raise Unavailable("Redis is away: the ratio could not be pinned", retry_after_s=1.0)
    try:
        changes = await control.set_ratio(prefill, decode, body.grace_s, body.force)
    except BatonError:
        await store.unpin(pin, earlier)  # what could not be formed is not what the cluster is held to
        raise
    await _noted(given, before, (prefill, decode), changes)
    return await shown(control, store) | {"changes": msgspec.to_builtins(changes)}


async def shown(control: RoleControl, store: AdviceStore) -> Json:
    """Returns the current ratio, workers' roles, the changes under way, the operator's pin, the controller's advice
    and the last TIMELINE_SHOWN changes, as JSON.
    """
    prefill, decode = control.ratio()
    pin = await _pinned(store)
    advice, timeline = await store.get(), await store.timeline(TIMELINE_SHOWN)
    return {
        "prefill": prefill,
        "decode": decode,
        "workers": {info.worker_id: info.role for info in control.workers()},
        "changing": msgspec.to_builtins(control.changing()),
        "pin": msgspec.to_builtins(pin),
        "advice": msgspec.to_builtins(advice),
        "timeline": msgspec.to_builtins(timeline),
    }


async def _pinned(store: AdviceStore) -> RatioPin | None:
    try:
        return await store.pinned()
    except (RedisError, OSError):
        return None


async def _noted(
    given: RoleSurface, before: tuple[int, int], after: tuple[int, int], changes: list[RoleChange]
) -> None:
    """An operator's change: pinned, and in the timeline."""
    now = given.wall_clock()
    await given.store.pin(RatioPin(*after, now, _who()))
    moved = tuple(c.worker for c in changes if c.before != c.after)
    seconds = max((c.seconds for c in changes), default=0.0)
    kind, reason = ("rerole", "an operator asked") if moved else ("pin", "an operator pinned the ratio as it is")
    await given.store.note(TimelineEntry(now, kind, before, after, reason, moved, seconds, _who()))


async def _unpin(given: RoleSurface, now: tuple[int, int]) -> None:
    store = given.store
    if not store.controlled:
        raise InvalidRequest("there is no controller: controller.mode is off; start with advise or auto", "ratio")
    if not (await store.set_mode("auto") and await store.pin(None)):
        raise Unavailable("Redis is away: the pin could not be taken back", retry_after_s=1.0)
    await store.note(
        TimelineEntry(given.wall_clock(), "unpin", now, now, "an operator gave the dial back", by=_who())
    )


def _required(surface: RoleSurface | None) -> RoleSurface:
    if surface is None:
        raise Unavailable("this router is not part of a cluster whose roles can be changed")
    return surface


def _who() -> str:
    return CALLER.get().tenant or "operator"


def _require_admin() -> None:
    key = CALLER.get().key
    if key is not None and not key.admin:
        raise Forbidden("roles and the ratio are for keys made with --admin", "authorization")
