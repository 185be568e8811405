"""Who a call comes from, set at the border for everything that the call leads to.

Knows nothing of headers or quotas: ``gate`` finds out who it is, the surfaces set it, ``generation`` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import msgspec

from baton.protos.errors import InvalidRequest
from baton.router.access.keys import ApiKey

MAX_SLO_MS = 3_600_000
TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
SESSION_HEADERS = ("x-session-id", "session-id", "session_id")  # gateways' name, and coding agents' own
MAX_SESSION = 256
FIRST_PRIORITY, LAST_PRIORITY = -(2**31), 2**31 - 1  # what the wire carries (int32 in worker.proto)


class Caller(msgspec.Struct, frozen=True):
    """Holds who makes one call, and what its headers ask for.

    ``request_id`` is ours and unique ("": make one); ``asked_id`` is the caller's own, any text.

    ``key`` None: keys are not asked for here. SLOs in seconds; 0: none was asked for. ``session``: what its headers
    call the conversation.
    """

    request_id: str = ""
    asked_id: str = ""
    key: ApiKey | None = None
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    session: str = ""

    @property
    def tenant(self) -> str:
        """Returns the tenant of the key; empty where keys are not asked for."""
        return self.key.tenant if self.key else ""

    def salted(self, cache_salt: bytes) -> bytes:
        """Returns the chain's root salt of this call: a client's own narrows its tenant's, and can't reach
        another's.
        """
        return self.key.salt + cache_salt if self.key else cache_salt

    def priority(self, asked: int) -> int:
        """Returns the request's priority in 32 bits; what is beyond them is the last or the first there is.

        With keys, a client may only make its requests less urgent than its key is.
        """
        wanted = self.key.priority + max(0, asked) if self.key else asked
        return min(max(wanted, FIRST_PRIORITY), LAST_PRIORITY)

    @property
    def sees_all(self) -> bool:
        """Returns whether the caller may see every tenant's records."""
        return self.key is None or self.key.admin

    def may_use(self, tenant: str) -> bool:
        """Returns whether the caller may use what belongs to ``tenant``; "" belongs to all."""
        return not tenant or self.sees_all or self.tenant == tenant

    def may_see(self, tenant: str) -> bool:
        """Returns whether the caller may see another request's record."""
        return self.sees_all or self.tenant == tenant


NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=NOBODY)


def with_call(caller: Caller, own_id: str, asked_id: str, header: Callable[[str], str | None]) -> Caller:
    """Returns ``caller`` for one call: its ids, and the SLOs and session that its headers name.

    Raises InvalidRequest.
    """
    ttft, tpot = (slo_seconds(name, header(name)) for name in (TTFT_HEADER, TPOT_HEADER))
    return Caller(own_id, asked_id, caller.key, ttft, tpot, session_of(header))


def session_of(header: Callable[[str], str | None]) -> str:
    """Returns the first of SESSION_HEADERS that is there. Raises InvalidRequest for an endless one."""
    name, text = next(((name, text) for name in SESSION_HEADERS if (text := header(name))), ("", ""))
    if len(text) > MAX_SESSION:
        raise InvalidRequest(f"{name} has {len(text)} characters: give {MAX_SESSION} at most", name)
    return text


def slo_seconds(name: str, text: str | None) -> float:
    """Converts a header in milliseconds to seconds; 0 for none. Raises InvalidRequest."""
    if not text:
        return 0.0
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds <= MAX_SLO_MS:
        raise InvalidRequest(f"{name} is {text!r}: give milliseconds over 0, {MAX_SLO_MS} at most", name)
    return milliseconds / 1000
