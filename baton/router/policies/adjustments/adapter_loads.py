"""Adapter affinity for routing: a way whose workers must load the request's adapter first costs the time of the
load.

Knows nothing of who loads adapters or how long one took. Like a policy, a pure function over any policy. A policy
in seconds has the wait added as the term ``adapter``: of the two workers' loads, which run in parallel, the longer
one. A policy in another unit is asked about the workers that hold the adapter, unless they find no way.
"""

from __future__ import annotations

import msgspec

from baton.router.policies import (
    Candidate,
    ClusterSnapshot,
    Option,
    Policy,
    RoutingDecision,
    RoutingRequest,
    cheapest_first,
    fits,
    least,
)


def with_adapter_loads(policy: Policy) -> Policy:
    """Returns a policy that chooses as ``policy`` does but accounts for the time to load the request's adapter."""

    def choose(snapshot: ClusterSnapshot, request: RoutingRequest) -> RoutingDecision | None:
        waits = {c.id: c.adapter_s for c in (*snapshot.prefill, *snapshot.decode)}
        if not any(waits.values()):
            return policy(snapshot, request)
        holders = _holders(snapshot, request.tokens)
        held = policy(holders, request) if holders.decode else None
        best = policy(snapshot, request) if held is None or held.in_seconds else held
        if best is None or not best.in_seconds:
            return best
        return _weighed(best, held, waits, snapshot.turn)

    return choose


def _holders(snapshot: ClusterSnapshot, tokens: int) -> ClusterSnapshot:
    """Returns the workers that hold the adapter, without decode workers that no holder can prefill for although
    another worker could: a policy would let those read every prompt themselves.
    """
    prefill = tuple(p for p in snapshot.prefill if not p.adapter_s)

    def served(d: Candidate, by: tuple[Candidate, ...]) -> bool:
        return any(fits(p, d, tokens) for p in by)

    decode = tuple(d for d in snapshot.decode if not d.adapter_s)
    kept = tuple(d for d in decode if served(d, prefill) or not served(d, snapshot.prefill))
    return msgspec.structs.replace(snapshot, prefill=prefill, decode=kept)


def _weighed(
    best: RoutingDecision, held: RoutingDecision | None, waits: dict[str, float], turn: int
) -> RoutingDecision:
    """The options of both decisions with their loads, cheapest first; a decision lists its cheapest ones alone."""
    listed = {_way(o): o for o in (*best.options, *(held.options if held else ()))}
    ranked = cheapest_first([_with_load(option, waits) for option in listed.values()])
    more = max(0, len(best.options) + best.more - len(ranked))
    return msgspec.structs.replace(best, taken=least(ranked, turn), options=tuple(ranked), more=more)


def _with_load(option: Option, waits: dict[str, float]) -> Option:
    wait = max(waits.get(option.decode, 0.0), waits.get(option.prefill, 0.0))
    return msgspec.structs.replace(option, terms={**option.terms, "adapter": wait}) if wait else option


def _way(option: Option) -> tuple[str, str, str]:
    return option.way, option.prefill, option.decode
