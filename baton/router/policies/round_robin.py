"""Routing policy "round_robin": each worker of a role in turn, whatever its load.

Inputs: the turn. Intent: the plain baseline that the others are measured against; fair when requests are alike. A
prompt whose uncached rest is short still goes straight to a decode worker.

Example: 2P1D, turns 0, 1, 2 -> p0, p1, p0.
"""

from __future__ import annotations

from baton.router.policies import ClusterSnapshot, Option, RoutingDecision, RoutingRequest, local_ways, pairs


def choose(snapshot: ClusterSnapshot, request: RoutingRequest) -> RoutingDecision | None:
    """Returns the decision for the workers whose turn it is among those with room; None if there are none."""
    turn = snapshot.turn
    options = [Option("local", d.id) for d in local_ways(snapshot, request)]
    if options:
        return RoutingDecision("round_robin", options[turn % len(options)], tuple(options))
    options = [Option("prefill", d.id, p.id) for p, d in pairs(snapshot, request)]
    if not options:
        return None
    readers = sorted({o.prefill for o in options})
    of_reader = [o for o in options if o.prefill == readers[turn % len(readers)]]
    return RoutingDecision("round_robin", of_reader[turn % len(of_reader)], tuple(options))
