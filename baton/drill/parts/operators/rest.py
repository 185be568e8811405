"""Operators of a simulated run who ask a router's REST endpoints for roles, ratios and holds.

Knows nothing of when, or of what must come of it.
"""

from __future__ import annotations

import orjson

from baton.drill.parts.calls import RouterCalls
from baton.drill.parts.http import HttpAsk
from baton.protos.errors import BY_NAME, BatonError, InvalidRequest, NoWorker
from baton.protos.json import Json

BY_CODE: dict[str, type[BatonError]] = {kind.label: kind for kind in BY_NAME.values()}
BY_CODE["invalid_value"] = InvalidRequest  # what clients of OpenAI know it by


class RestOperators:
    """Asks the routers behind ``calls``, each by its number.

    Each method raises the error that the answer tells of, NoWorker where the router is down or dies at it.
    """

    def __init__(self, calls: RouterCalls) -> None:
        self._calls = calls

    async def role(self, router: int, slot: str, role: str, grace_s: float) -> None:
        """Asks for another role of a worker, which pins the ratio that comes of it."""
        await self._ask(router, f"/v1/workers/{slot}/role", {"role": role, "grace_s": grace_s})

    async def ratio(self, router: int, prefill: int, decode: int, grace_s: float) -> None:
        """Asks for a ratio, which is pinned."""
        await self._ask(router, "/v1/ratio", {"ratio": f"{prefill}:{decode}", "grace_s": grace_s})

    async def hold(self, router: int, slot: str, how: str) -> None:
        """Takes a worker out of rotation, or with ``how`` "none" puts it back."""
        await self._ask(router, f"/v1/workers/{slot}/hold", {"hold": how})

    async def _ask(self, router: int, path: str, body: Json) -> None:
        call = await self._calls.asked(router, HttpAsk(path, orjson.dumps(body)))
        if call is None or not call.over:
            raise NoWorker(f"router {router} is down, or died")
        if call.status != 200:
            said = orjson.loads(call.body)["error"]
            raise BY_CODE.get(said["code"], BatonError)(said["message"])
