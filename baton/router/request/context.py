"""The context of a request beside its tokens and sampling: its caller's key, priority, deadline, SLOs and adapter.

Knows nothing of prompts, workers or HTTP. It is made once, of a call's body and its caller, and handed on whole.
"""

from __future__ import annotations

import msgspec

from baton.router.access.caller import Caller
from baton.router.access.keys import ApiKey


class MarkedTokens(msgspec.Struct, frozen=True):
    """Holds how many leading tokens of a prompt lie before the last breakpoint of the cache, by its time to live; 0
    for no such breakpoint.
    """

    hour: int = 0
    minutes: int = 0  # five of them, the default

    @property
    def all(self) -> int:
        """Returns the number of tokens before the last breakpoint of any time to live."""
        return max(self.hour, self.minutes)


class RequestContext(msgspec.Struct, frozen=True):
    """Holds the context of one call, shared by all of its prompts and choices.

    ``deadline`` is on the router's monotonic clock; SLOs are in seconds, 0 for none. A lower ``priority`` is
    sooner. ``asked_id`` is the caller's own id of the call and not unique. ``session`` names the conversation that
    the call belongs to, or is "". ``retained``: the caller hints that it will use the prefix again, of which
    ``retained_tokens`` is the length, 0 for the whole prompt with its answer; ``marked`` says where the caller's
    breakpoints are. ``can_wait``: nobody waits for the answer, so that a class's SLOs are not its own, and
    what is left until the deadline counts from when workers are found.
    """

    adapter_id: str = ""
    tenant_salt: bytes = b""
    priority: int = 0
    deadline: float | None = None
    traceparent: str = ""
    session: str = ""
    retained: bool = False
    retained_tokens: int = 0
    marked: MarkedTokens = MarkedTokens()
    asked_id: str = ""
    key: ApiKey | None = None
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    can_wait: bool = False

    @property
    def tenant(self) -> str:
        """Returns the tenant of the caller's key; "" where keys are not required."""
        return self.key.tenant if self.key else ""

    @property
    def has_slo(self) -> bool:
        """Returns whether there is a TTFT or TPOT SLO, the request's own or its class's."""
        return bool(self.slo_ttft_s or self.slo_tpot_s)

    def of_caller(self, caller: Caller) -> RequestContext:
        """Returns this context, made of a call's body, with the caller's key, headers and rights applied."""
        return msgspec.structs.replace(
            self,
            tenant_salt=caller.salted(self.tenant_salt),
            priority=caller.priority(self.priority),
            session=caller.session or self.session,
            asked_id=self.asked_id or caller.asked_id,
            can_wait=caller.can_wait,
            key=caller.key,
            slo_ttft_s=caller.slo_ttft_s,
            slo_tpot_s=caller.slo_tpot_s,
        )

    def with_marks(self, marked: MarkedTokens, whole: bool) -> RequestContext:
        """Returns this context with the breakpoints ``marked``. With ``whole`` the hint is about the prompt and its
        answer, as where a breakpoint behind a whole conversation says that it goes on.
        """
        retained = whole or marked.all > 0
        return msgspec.structs.replace(
            self, marked=marked, retained=retained, retained_tokens=0 if whole else marked.all
        )

    def with_slos(self, ttft_s: float, tpot_s: float) -> RequestContext:
        """Returns this context with the given SLOs, in seconds, in place of missing ones, unless nobody waits."""
        if self.can_wait:
            return self
        ttft, tpot = self.slo_ttft_s or ttft_s, self.slo_tpot_s or tpot_s
        if (ttft, tpot) == (self.slo_ttft_s, self.slo_tpot_s):
            return self
        return msgspec.structs.replace(self, slo_ttft_s=ttft, slo_tpot_s=tpot)
