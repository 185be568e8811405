"""The witness of API keys: who had to be let in, and who had to be refused. Shares no code with the router's.

Knows nothing of how keys travel or are looked up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from baton.drill.scenario import ClientKey, Request
from baton.protos.nouns import TENANT_SALT_BYTES

LET_IN = ""
UNKNOWN, NOT_ITS_MODEL = "unauthenticated", "forbidden"
REFUSALS = {401: UNKNOWN, 403: NOT_ITS_MODEL}  # by HTTP status
HEARD_S = 1.5  # seconds after which every router has heard of a revoked key, also one whose clock is slow


class KeyWitness:
    """Holds what became of calls with ``keys`` against when these were revoked.

    Call ``asked`` as a client asks, ``revoked`` as an operator revokes; times are loop time in seconds.
    """

    def __init__(self, keys: Sequence[ClientKey], violated: Callable[[str], None]) -> None:
        self._keys, self._violated = keys, violated
        self._asked: dict[int, float] = {}
        self._revoked: dict[int, float] = {}

    def asked(self, number: int, now: float) -> None:
        """Stores that request ``number`` is asked at ``now``."""
        self._asked[number] = now

    def revoked(self, index: int, now: float) -> None:
        """Stores that key number ``index`` isn't valid from ``now`` on."""
        self._revoked[index] = now

    def ended(self, request: Request, refusal: str, answered: bool) -> bool:
        """Checks the end of a call: ``refusal`` is one of REFUSALS or LET_IN, ``answered`` whether it was answered.

        Returns whether it was rightly refused.
        """
        may = self._may(request)
        if refusal != LET_IN and refusal not in may:
            self._violated(f"request {request.number}: refused as {refusal}, and its key is good")
        if answered and LET_IN not in may:
            self._violated(f"request {request.number}: answered, and has no key for it")
        return refusal != LET_IN and refusal in may

    def _may(self, request: Request) -> set[str]:
        """Returns the ways in which the call of ``request`` may end."""
        if not self._keys:
            return {LET_IN}
        if request.key is None or request.key < 0:
            return {UNKNOWN}
        good = NOT_ITS_MODEL if self._keys[request.key].bound_elsewhere else LET_IN
        since = self._revoked.get(request.key)
        asked = self._asked.get(request.number, 0.0)
        if since is None or (asked < since and not request.over_grpc):
            return {good}
        return {UNKNOWN} if asked > since + HEARD_S else {good, UNKNOWN}


def salt_of(request: Request) -> bytes:
    """Returns the salt of the prefix-cache blocks of ``request``: its key's tenant's, or what the client gives."""
    if request.key is None:
        return request.tenant.encode()
    return hashlib.sha256(b"baton tenant salt\0" + request.tenant.encode()).digest()[:TENANT_SALT_BYTES]
