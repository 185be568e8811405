"""Routing policy "cost": the way predicted to cost the fewest seconds, to this request and to those that it slows
down.

Inputs, formula, intent and an example are in cost.md. Everything that depends on one worker alone is computed once
per worker, so that a decision over P x D pairs costs P + D predictions.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.cost.curves import decode_seconds, exposed_seconds, prefill_seconds
from baton.kv.layout.room import handoff_bytes, held_tokens
from baton.protos.measurements import StepCurve, TransferCurve
from baton.protos.nouns import BLOCK_TOKENS
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
from baton.router.policies.adjustments.prefix_fetch import best_fetch

WRITE_TOKENS = 64  # tokens of an answer that are predicted, because its true length isn't known
CHUNK_TOKENS = 512  # tokens whose blocks ship together, last, when nothing is left to compute beside them
LATE = 4.0  # a second beyond an SLO costs as much as this many within it
RECORDED = 64  # options that a decision lists; the others are only counted
# Until a worker has reported its own: a small model on a few CPU cores.
UNKNOWN_STEP = StepCurve(2e-3, 5e-5, 1e-9, 2e-4, 1e-7)
UNKNOWN_TRANSFER = TransferCurve(1e-3, 1e-9)


class _Reader(NamedTuple):
    """A worker that would compute the prompt: seconds until it begins, seconds it takes."""

    queue: float
    read: float


class _Writer(NamedTuple):
    """A worker that would write the answer: seconds per step with us, what we add to everybody's, and the bytes
    that a handoff sends it, with those of its last chunk.
    """

    step: float
    crowding: float
    sent: int
    last: int


def choose(snapshot: ClusterSnapshot, request: RoutingRequest) -> RoutingDecision | None:
    """Returns the decision with the cheapest way, equally cheap ones in turn; None if no worker has room."""
    readers: dict[str, _Reader] = {}
    writers: dict[str, _Writer] = {}
    options = []
    for d in local_ways(snapshot, request):
        terms = _local(d, request, _reader(readers, d, request), _writer(writers, d, request))
        options.append(Option("local", d.id, "", terms, request.cached(d.id)))
    for p, d in pairs(snapshot, request):
        terms = _disaggregated(p, request, _fetcher(readers, snapshot, p, request), _writer(writers, d, request))
        options.append(Option("prefill", d.id, p.id, terms, request.cached(p.id)))
    if not options:
        return None
    ranked = cheapest_first(options)
    taken, listed = least(ranked, snapshot.turn), tuple(ranked[:RECORDED])
    return RoutingDecision("cost", taken, listed, in_seconds=True, more=len(ranked) - len(listed))


def _local(worker: Candidate, request: RoutingRequest, reader: _Reader, writer: _Writer) -> dict[str, float]:
    terms = {
        "queue": reader.queue,
        "read": reader.read,
        "write": _outputs(request) * writer.step,
        "harm": writer.crowding + worker.running * reader.read,
    }
    return _with_lateness(terms, request, reader.queue + reader.read, writer.step)


def _disaggregated(
    prefill: Candidate, request: RoutingRequest, reader: _Reader, writer: _Writer
) -> dict[str, float]:
    curve = prefill.load.transfer_curve or UNKNOWN_TRANSFER
    ship = exposed_seconds(curve, writer.sent, writer.last, reader.read)
    terms = {
        "queue": reader.queue,
        "read": reader.read,
        "ship": ship,
        "write": _outputs(request) * writer.step,
        "harm": writer.crowding,
    }
    return _with_lateness(terms, request, reader.queue + reader.read + ship, writer.step)


def _with_lateness(
    terms: dict[str, float], request: RoutingRequest, first_s: float, step_s: float
) -> dict[str, float]:
    """Adds the term for what is predicted to come after an SLO; without SLOs there is no such term."""
    late = 0.0
    if request.slo_ttft_s:
        late += max(0.0, first_s - request.slo_ttft_s)
    if request.slo_tpot_s:
        late += _outputs(request) * max(0.0, step_s - request.slo_tpot_s)
    if late:
        terms["late"] = LATE * late
    return terms


def _reader(known: dict[str, _Reader], worker: Candidate, request: RoutingRequest) -> _Reader:
    found = known.get(worker.id)
    if found is None:
        curve, uncached = _curve(worker), request.uncached(worker.id)
        queue = prefill_seconds(curve, worker.waiting_tokens)
        found = known[worker.id] = _Reader(queue, prefill_seconds(curve, uncached, request.tokens - uncached))
    return found


def _fetcher(
    known: dict[str, _Reader], snapshot: ClusterSnapshot, worker: Candidate, request: RoutingRequest
) -> _Reader:
    """A prefill worker may take blocks that others hold."""
    if worker.id not in known:
        computing, fetch = _reader(known, worker, request), best_fetch(snapshot, request, worker)
        if fetch is not None:
            known[worker.id] = computing._replace(read=max(0.0, computing.read - fetch.saved))
    return known[worker.id]


def _writer(known: dict[str, _Writer], worker: Candidate, request: RoutingRequest) -> _Writer:
    found = known.get(worker.id)
    if found is None:
        step, before = _step_seconds(worker, request, 1), _step_seconds(worker, request, 0)
        crowding = worker.running * _outputs(request) * (step - before)
        found = known[worker.id] = _Writer(step, crowding, *_sent(worker, request))
    return found


def _sent(writer: Candidate, request: RoutingRequest) -> tuple[int, int]:
    """Returns the bytes of the request's KV that ``writer`` lacks, and those of its last chunk."""
    layout, held = writer.info.layout, request.hits.get(writer.id, 0) * BLOCK_TOKENS
    size = handoff_bytes(layout, request.tokens, held)
    return size, min(size, handoff_bytes(layout, min(CHUNK_TOKENS, max(1, request.tokens - held))))


def _step_seconds(worker: Candidate, request: RoutingRequest, added: int) -> float:
    context = held_tokens(worker.info.layout, worker.load.leased_pages, worker.running) + added * request.tokens
    return decode_seconds(_curve(worker), worker.running + added, round(context))


def _curve(worker: Candidate) -> StepCurve:
    return worker.load.step_curve or UNKNOWN_STEP


def _outputs(request: RoutingRequest) -> int:
    return min(request.max_new_tokens, WRITE_TOKENS)
