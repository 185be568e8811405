"""``GET /v1/requests/{id}/explain``: why a request was routed as it was, and how it ended.

Knows nothing of policies; a record is JSON that ``decisions`` wrote.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from baton.protos.errors import RequestUnknown
from baton.router.access.caller import CALLER
from baton.router.observe.decisions import DecisionLog

MAX_ID = 160  # characters of an id that may be a request's


class _Owner(msgspec.Struct):
    tenant: str = ""


def explain_routes(decisions: DecisionLog) -> APIRouter:
    """Returns the route of ``/v1/requests/{id}/explain``."""
    routes = APIRouter()

    @routes.get("/v1/requests/{request_id:path}/explain")
    async def explain(request_id: str) -> Response:
        """The record of a request of the last hour; of one's own tenant, where keys are asked for."""
        record = await _record(decisions, request_id)
        if record is None or not CALLER.get().may_see(msgspec.json.decode(record, type=_Owner).tenant):
            raise RequestUnknown(
                f"no record of request {request_id[:MAX_ID]!r}: records are kept for an hour, under the answer's "
                "id or its x-request-id; a request that was refused before it was queued has none, because its "
                "answer names the field and the remedy",
                "request_id",
            )
        return Response(record, media_type="application/json")

    return routes


async def _record(decisions: DecisionLog, request_id: str) -> bytes | None:
    if len(request_id) > MAX_ID:
        return None
    return await decisions.find(request_id, CALLER.get().tenant)
