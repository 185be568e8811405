"""The caller of one API call: its key, the ids of the call, and what its headers ask for.

Knows nothing of headers or quotas: ``gate`` identifies the caller, the API surfaces set it, ``generation`` reads
it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import msgspec

from baton.protos.errors import InvalidRequest
from baton.router.access.keys import ApiKey

MAX_SLO_MS = 3_600_000  # milliseconds: an hour
TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
SESSION_HEADERS = ("x-session-id", "session-id", "session_id")  # gateways' name, and coding agents' own
MAX_SESSION = 256  # characters of a session's name at most
FIRST_PRIORITY, LAST_PRIORITY = -(2**31), 2**31 - 1  # what the wire carries (int32 in worker.proto)


class Caller(msgspec.Struct, frozen=True):
    """Holds who makes one call, and what its headers ask for.

    ``request_id`` is this router's unique id of the call ("": one is made later); ``asked_id`` is the caller's own,
    any text. ``key`` is None where the router requires no API keys. SLOs are in seconds, 0 where none was asked
    for. ``session`` names the conversation that the call belongs to, "" if no header does. ``can_wait``: nobody
    waits for the answer; its time begins when workers are found for it, however long it has waited.
    """

    request_id: str = ""
    asked_id: str = ""
    key: ApiKey | None = None
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    session: str = ""
    can_wait: bool = False

    @property
    def tenant(self) -> str:
        """Returns the tenant of the caller's key; "" where the router requires no API keys."""
        return self.key.tenant if self.key else ""

    def salted(self, cache_salt: bytes) -> bytes:
        """Returns the salt that the hashes of the call's prefix-cache blocks start from: the tenant's salt followed
        by the client's ``cache_salt``, so that calls share cached blocks within their tenant only.
        """
        return self.key.salt + cache_salt if self.key else cache_salt

    def priority(self, asked: int) -> int:
        """Returns the priority of a request that asks for ``asked`` (lower is sooner), clamped to 32 signed bits.

        With a key, ``asked`` is added to the key's priority and can only make the request less urgent.
        """
        wanted = self.key.priority + max(0, asked) if self.key else asked
        return min(max(wanted, FIRST_PRIORITY), LAST_PRIORITY)

    @property
    def sees_all(self) -> bool:
        """Returns whether the caller may see every tenant's records: its key is an admin's, or keys are not
        required.
        """
        return self.key is None or self.key.admin

    def may_use(self, tenant: str) -> bool:
        """Returns whether the caller may use what belongs to ``tenant``; "" belongs to all."""
        return not tenant or self.sees_all or self.tenant == tenant

    def may_see(self, tenant: str) -> bool:
        """Returns whether the caller may see records of ``tenant``: its own, or any if it sees all."""
        return self.sees_all or self.tenant == tenant


NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=NOBODY)


def with_call(caller: Caller, own_id: str, asked_id: str, header: Callable[[str], str | None]) -> Caller:
    """Returns ``caller`` with one call's ids and with the SLOs and session that the call's headers name.

    ``header`` maps a header's name to its value or None. Raises InvalidRequest for a malformed header.
    """
    ttft, tpot = (slo_seconds(name, header(name)) for name in (TTFT_HEADER, TPOT_HEADER))
    return Caller(own_id, asked_id, caller.key, ttft, tpot, session_of(header))


def session_of(header: Callable[[str], str | None]) -> str:
    """Returns the value of the first header of SESSION_HEADERS that is given, else "".

    Raises InvalidRequest if it has over MAX_SESSION characters.
    """
    name, text = next(((name, text) for name in SESSION_HEADERS if (text := header(name))), ("", ""))
    if len(text) > MAX_SESSION:
        raise InvalidRequest(f"{name} has {len(text)} characters: give {MAX_SESSION} at most", name)
    return text


def slo_seconds(name: str, text: str | None) -> float:
    """Converts the value ``text`` of header ``name`` from milliseconds to seconds; 0 if it is missing or empty.

    Raises InvalidRequest unless it is a number over 0 and at most MAX_SLO_MS.
    """
    if not text:
        return 0.0
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds <= MAX_SLO_MS:
        raise InvalidRequest(f"{name} is {text!r}: give milliseconds over 0, {MAX_SLO_MS} at most", name)
    return milliseconds / 1000
