"""The decision whether a prefill worker should fetch leading KV blocks from another worker's cache instead of
computing them.

Knows nothing of connections: like a policy, a pure function of the snapshot. Both sides of the comparison are
measured: the reader's own step curve against its own fetches (its handoffs, until it has fetched something).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from baton.cost.curves import prefill_seconds, transfer_seconds
from baton.cost.fit import PRIOR_STEP, PRIOR_TRANSFER
from baton.kv.layout.room import window_bytes
from baton.protos.nouns import BLOCK_TOKENS
from baton.router.policies import Candidate, ClusterSnapshot, Option, RoutingDecision, RoutingRequest

LEAST_LIMIT_S = 0.1  # the first fetch from a worker connects first
UNMEASURED_LIMIT_S = 2.0  # of a reader that has computed nothing: no figure says that computing is quicker


class Fetch(NamedTuple):
    """Describes leading blocks that ``source`` is said to have cached; ``seconds`` to fetch them, ``saved`` seconds
    over computing them (above 0).
    """

    source: Candidate
    blocks: int
    seconds: float
    saved: float


def best_fetch(snapshot: ClusterSnapshot, request: RoutingRequest, reader: Candidate) -> Fetch | None:
    """Returns the fetch by which prefill worker ``reader`` gets prompt blocks from the worker that holds most; None
    if computing is as fast.

    None also if no worker holds more than ``reader``.
    """
    own = request.hits.get(reader.id, 0)
    source = _fullest(snapshot, request, reader, own)
    if source is None:
        return None
    blocks = min(request.hits[source.id], (request.tokens - 1) // BLOCK_TOKENS)
    layout = source.info.layout
    size = (blocks - own) * layout.run_bytes + window_bytes(layout, blocks * BLOCK_TOKENS)
    seconds = _fetch_seconds(reader, size)
    saved = _compute_seconds(reader, own, blocks) - seconds
    return Fetch(source, blocks, seconds, saved) if saved > 0 else None


def with_fetch(snapshot: ClusterSnapshot, request: RoutingRequest, decision: RoutingDecision) -> RoutingDecision:
    """Returns ``decision`` with the fetch that its prefill worker should make first, if any is worth it."""
    reader = next((p for p in snapshot.prefill if p.id == decision.taken.prefill), None)
    if reader is None or (fetch := best_fetch(snapshot, request, reader)) is None:
        return decision
    taken = msgspec.structs.replace(
        decision.taken,
        fetch_from=fetch.source.id,
        fetch_address=fetch.source.info.address,
        fetch_blocks=fetch.blocks,
        fetch_limit_s=max(_least_limit_s(reader), fetch.seconds + fetch.saved),
    )
    options = tuple(taken if o is decision.taken else o for o in decision.options)
    return msgspec.structs.replace(decision, taken=taken, options=options)


def uncached(request: RoutingRequest, option: Option) -> int:
    """Returns the prompt tokens that the option's reader will compute, after its cache and its fetch; at least
    1.
    """
    return min(request.uncached(option.reader), max(1, request.tokens - option.fetch_blocks * BLOCK_TOKENS))


def _fullest(snapshot: ClusterSnapshot, request: RoutingRequest, reader: Candidate, own: int) -> Candidate | None:
    """Returns the worker that holds the most, if that is more than ``own``; equals by id."""
    most, found = own, None
    for worker in (*snapshot.prefill, *snapshot.decode):
        held, a, b = request.hits.get(worker.id, 0), worker.info, reader.info
        like = (a.fingerprint, a.layout) == (b.fingerprint, b.layout)  # cached blocks are fetched as they are
        if held > most and worker.id != reader.id and like:
            most, found = held, worker
    return found


def _least_limit_s(reader: Candidate) -> float:
    return LEAST_LIMIT_S if reader.load.step_curve else UNMEASURED_LIMIT_S


def _fetch_seconds(reader: Candidate, size: int) -> float:
    return transfer_seconds(reader.load.fetch_curve or reader.load.transfer_curve or PRIOR_TRANSFER, size)


def _compute_seconds(reader: Candidate, own: int, blocks: int) -> float:
    curve = reader.load.step_curve or PRIOR_STEP
    return prefill_seconds(curve, (blocks - own) * BLOCK_TOKENS, own * BLOCK_TOKENS)
