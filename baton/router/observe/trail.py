"""The trail of one choice: where it was placed, why it left, and what was then observed; also as JSON.

Knows nothing of how a policy chooses, nor of where records are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from baton.protos.errors import BatonError
from baton.protos.json import Json
from baton.protos.nouns import WorkerInfo
from baton.router.policies import Option, RoutingDecision
from baton.router.request.request import ChoiceSummary

# What a term of the cost model predicts -> the station whose seconds it can be held against.
OBSERVED_AT = {"queue": "prefill_queue", "read": "prefill", "ship": "transfer"}
NAMES = {"queue": "queue", "read": "prefill", "ship": "transfer"}


class WorkerRanks(msgspec.Struct, frozen=True):
    """Says where a worker's ranks ran: their ``widths`` by setting, and each rank's host ("": the worker's own)."""

    widths: dict[str, int]
    hosts: tuple[str, ...]


def ranks_of(infos: Mapping[str, WorkerInfo]) -> dict[str, WorkerRanks]:
    """Returns the ranks of those workers of ``infos`` that have several, by worker id."""
    return {worker: WorkerRanks(i.widths, i.rank_hosts) for worker, i in infos.items() if i.rank_hosts}


class PlacementRecord(msgspec.Struct):
    """Records one placement: ``at_s`` is seconds after the request was opened, ``waited_s`` seconds in the queue.

    ``left_for`` says why the choice left, "" if it didn't; ``weights`` name the decode worker's weights. ``ranks``
    has those of its workers that have several.
    """

    at_s: float
    waited_s: float
    decision: RoutingDecision
    left_for: str = ""
    weights: str = ""
    ranks: dict[str, WorkerRanks] = {}


class Trail(msgspec.Struct):
    """Records the placements, the error and the summary of one choice."""

    choice: int
    summary: ChoiceSummary
    placements: list[PlacementRecord] = []
    error: str = ""
    over: bool = False

    def placed(
        self,
        decision: RoutingDecision,
        at_s: float,
        waited_s: float,
        weights: str = "",
        ranks: dict[str, WorkerRanks] | None = None,
    ) -> None:
        """Adds a placement, ``at_s`` seconds after the request was opened and ``waited_s`` seconds in the queue."""
        self.placements.append(PlacementRecord(at_s, waited_s, decision, weights=weights, ranks=ranks or {}))

    def left(self, reason: str) -> None:
        """Stores why the choice left its last placement."""
        if self.placements:
            self.placements[-1].left_for = reason

    def failed(self, error: BatonError) -> None:
        """Notes that the choice ended with ``error``, without a complete answer."""
        self.error, self.over = f"{error.label}: {error.message}", True


class TrailWriter:
    """Writes one choice's trail; ``changed`` is called when the record should be stored again."""

    __slots__ = ("_changed", "_trail")

    def __init__(self, trail: Trail, changed: Callable[[], object]) -> None:
        self._trail, self._changed = trail, changed

    def placed(
        self,
        decision: RoutingDecision,
        at_s: float,
        waited_s: float,
        weights: str,
        ranks: dict[str, WorkerRanks],
    ) -> None:
        """Adds a placement, ``at_s`` seconds after the request was opened and ``waited_s`` seconds in the queue."""
        self._trail.placed(decision, at_s, waited_s, weights, ranks)
        self._changed()

    def left(self, reason: str) -> None:
        """Notes why the choice left its last placement."""
        self._trail.left(reason)

    def end(self, error: BatonError | None) -> None:
        """Notes that the choice has ended, with its answer or with ``error``."""
        self._trail.over = True
        if error is not None:
            self._trail.failed(error)
        self._changed()


def choice_json(trail: Trail) -> Json:
    """Returns a choice's trail as a JSON object."""
    summary = trail.summary
    return {
        "choice": trail.choice,
        "way": summary.way,
        "prefill_worker": summary.prefill_worker,
        "decode_worker": summary.decode_worker,
        "attempts": summary.attempts,
        "cached_tokens": summary.cached_tokens,
        "completion_tokens": summary.completion_tokens,
        "accepted_drafts": summary.accepted_drafts,
        "rejected_drafts": summary.rejected_drafts,
        "finish_reason": summary.finish_reason,
        "error": trail.error,
        "placements": [_placement(p) for p in trail.placements],
        "observed_s": summary.stations,
        "predicted_against_observed": predicted_against_observed(trail),
    }


def _placement(placement: PlacementRecord) -> Json:
    decision = placement.decision
    others = [o for o in decision.options if o is not decision.taken]
    return {
        "at_s": placement.at_s,
        "waited_s": placement.waited_s,
        "policy": decision.policy,
        "unit": "seconds" if decision.in_seconds else "none",
        "taken": _option(decision.taken),
        "not_taken": [_option(o) for o in others],
        "not_listed": decision.more,
        "left_for": placement.left_for,
        "weights": placement.weights,
        "ranks": msgspec.to_builtins(placement.ranks),
    }


def _option(option: Option) -> Json:
    return {
        "way": option.way,
        "prefill": option.prefill,
        "decode": option.decode,
        "cost": option.cost,
        "terms": option.terms,
        "cached_tokens": option.cached_tokens,
        "fetch": {"from": option.fetch_from, "blocks": option.fetch_blocks} if option.fetch_from else None,
    }


def predicted_against_observed(trail: Trail) -> dict[str, dict[str, float | None]]:
    """Returns the first placement's predicted and observed seconds for queue, prefill, transfer and ttft; {} if the
    policy predicts no seconds.
    """
    if not trail.placements or not trail.placements[0].decision.in_seconds:
        return {}
    first, seen = trail.placements[0], trail.summary.stations
    terms = first.decision.taken.terms
    compared = {
        NAMES[term]: {"predicted_s": terms[term], "observed_s": seen.get(OBSERVED_AT[term])}
        for term in NAMES
        if term in terms
    }
    predicted = first.at_s + sum(terms.get(term, 0.0) for term in NAMES)
    compared["ttft"] = {"predicted_s": predicted, "observed_s": seen.get("ttft")}
    return compared
