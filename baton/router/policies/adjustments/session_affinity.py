"""Session affinity: a turn goes where the session's last one was decoded, unless that costs too much.

Knows nothing of who remembers sessions. Like a policy, a pure function; it asks any policy twice, over all workers
and with the session's decode worker alone, so that no policy needs to know of it. The worker's ways get a credit,
the term ``session``, and the least sum wins. What the session's blocks save is no part of it: prefix hits count
that already, where the index knows of them. It does not yet know of the last answer's own.
"""

from __future__ import annotations

import msgspec

from baton.router.policies import ClusterSnapshot, Option, Policy, RoutingDecision, RoutingRequest

SHARE = 0.25  # of the cheapest way's cost
LEAST = 0.05  # in the policy's own unit: seconds, or parts of a batch


def choose_with_session(
    policy: Policy, snapshot: ClusterSnapshot, request: RoutingRequest
) -> RoutingDecision | None:
    """Returns the decision of ``policy``, or the way via the session's decode worker if it costs at most SHARE (or
    LEAST) more.

    None if ``policy`` finds no worker with room.
    """
    best = policy(snapshot, request)
    at_home = tuple(d for d in snapshot.decode if d.id == request.session_worker)
    if best is None or not at_home or request.session_worker in request.avoid:
        return best
    kept = policy(msgspec.structs.replace(snapshot, decode=at_home), request)
    if kept is None:
        return best
    credit = max(LEAST, SHARE * best.taken.cost)
    home = _credited(kept.taken, credit)
    others = tuple(o for o in best.options if _way(o) != _way(home))
    if home.cost <= best.taken.cost:
        return msgspec.structs.replace(best, taken=home, options=(home, *others))
    return msgspec.structs.replace(best, options=(*others, home))


def _credited(option: Option, credit: float) -> Option:
    return msgspec.structs.replace(option, terms={**option.terms, "session": -credit})


def _way(option: Option) -> tuple[str, str, str]:
    return option.way, option.prefill, option.decode
