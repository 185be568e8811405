"""Routing policy "least_loaded": the prefill worker with the fewest tokens to read, the decode worker with the
emptiest batch.

Inputs: tokens that wait at each worker, sequences in each batch. Formula, both terms without unit: waiting_tokens /
window + running / max_batch. Intent: even load without a model of cost. The cache counts only where it makes the
uncached rest short enough for the local way.

Example: p0 has 4,000 tokens to read and p1 none -> p1.
"""

from __future__ import annotations

from baton.router.policies import (
    Candidate,
    ClusterSnapshot,
    Option,
    RoutingDecision,
    RoutingRequest,
    cheapest_first,
    least,
    local_ways,
    pairs,
)


def choose(snapshot: ClusterSnapshot, request: RoutingRequest) -> RoutingDecision | None:
    """Returns the decision for the least loaded workers among those with room; None if there are none."""
    options = [Option("local", d.id, terms=_terms(snapshot, d, d)) for d in local_ways(snapshot, request)]
    if not options:
        options = [Option("prefill", d.id, p.id, _terms(snapshot, p, d)) for p, d in pairs(snapshot, request)]
    if not options:
        return None
    return RoutingDecision("least_loaded", least(cheapest_first(options), snapshot.turn), tuple(options))


def _terms(snapshot: ClusterSnapshot, reader: Candidate, writer: Candidate) -> dict[str, float]:
    return {
        "read": reader.waiting_tokens / snapshot.window_tokens,
        "write": writer.running / max(1, writer.info.max_batch),
    }
