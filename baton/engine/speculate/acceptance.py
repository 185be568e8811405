"""Estimates how likely each token of a draft is to be accepted, from earlier verdicts per kind of draft and per
sequence.

Knows nothing of costs or of how drafts are made. The chance of a token is that of its acceptance if all before it
are accepted; old verdicts fade. A kind is a source and a grade; a new sequence begins with the estimate over all of
the worker's sequences.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from baton.engine.speculate.draft import Draft
from baton.engine.speculate.tree import ROOT, depths, ranks

FIRST_GUESS = 0.5  # chance of a draft's token before any was judged
WORKER_KEEP, OWN_KEEP = 1 - 1 / 64, 1 - 1 / 16  # factor on old verdicts' weight for each new one
OWN_WEIGHT = 2.0  # verdicts of a sequence's own that weigh as much as the worker's estimate
CAUTION = 0.5  # standard errors that an estimate is lowered by: uncertain drafts are left to probes
LEAST_SURE = 0.25  # least share of an estimate that remains, else rare kinds would never be tried
LEAST = 0.005  # drafts whose chance is below this aren't weighed up at all

SECOND = 0.3  # initial chance of a second guess, as a share of the first one's chance to fail; so on for a third

Kind = tuple[str, int, int]  # source, grade, and number of likelier guesses at the same place


class _Counts:
    """Holds faded counts of accepted and judged tokens by position in the draft."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._stood: list[float] = []
        self._tried: list[float] = []

    @property
    def judged(self) -> bool:
        """Returns whether any token was judged."""
        return bool(self._tried)

    def note(self, at: int, stood: bool) -> None:
        """Records whether the token at position ``at`` was accepted."""
        while len(self._tried) <= at:
            self._stood.append(0.0)
            self._tried.append(0.0)
        self._stood[at] = self._stood[at] * self._keep + stood
        self._tried[at] = self._tried[at] * self._keep + 1.0

    def chance(self, at: int, guess: float, weight: float) -> float:
        """Returns the estimate for position ``at``; ``guess`` counts as ``weight`` verdicts."""
        if at >= len(self._tried):
            return guess
        return (self._stood[at] + weight * guess) / (self._tried[at] + weight)

    def doubt(self, at: int, chance: float, weight: float) -> float:
        """Returns the standard error of the estimate ``chance`` for position ``at``."""
        tried = self._tried[at] if at < len(self._tried) else 0.0
        return math.sqrt(chance * (1.0 - chance) / (tried + weight))


class AcceptanceEstimate:
    """Estimates the acceptance of drafts of one worker, and learns from their verdicts."""

    def __init__(self) -> None:
        self._worker: dict[Kind, _Counts] = {}
        self._own: dict[int, dict[Kind, _Counts]] = {}

    def cumulative(self, seq: int, draft: Draft) -> list[float]:
        """Returns, for each token of ``draft``, the probability that it and all tokens before it are accepted.

        The list of a chain ends where that falls below LEAST; a tree's has an entry for every node.
        """
        if draft.parents:
            return self._of_tree(seq, draft)
        kind = draft.source, draft.grade, 0
        worker = self._worker.setdefault(kind, _Counts(WORKER_KEEP))
        own = self._own.get(seq, {}).get(kind)
        found, before, all_stand = list[float](), self._guess(draft), 1.0
        for at in range(len(draft.tokens)):
            before, chance = _estimate(worker, own, at, before)
            all_stand *= chance
            if all_stand < LEAST:
                break
            found.append(all_stand)
        return found

    def first(self, seq: int, draft: Draft) -> float:
        """Returns the probability that the first token of ``draft`` is accepted."""
        kind = draft.source, draft.grade, 0
        worker, own = self._worker.setdefault(kind, _Counts(WORKER_KEEP)), self._own.get(seq, {}).get(kind)
        return _estimate(worker, own, 0, self._guess(draft))[1]

    def _of_tree(self, seq: int, draft: Draft) -> list[float]:
        """Returns every node's probability: its own chance among its siblings, times its parent's."""
        mine, first = self._own.get(seq, {}), self._guess(draft)
        found, guesses = list[float](), dict[tuple[int, int], float]()  # by rank and depth
        for parent, depth, rank in zip(draft.parents, depths(draft.parents), ranks(draft.parents), strict=True):
            kind = draft.source, draft.grade, rank
            guess = guesses.get((rank, depth - 1), first if not rank else SECOND**rank * (1.0 - first))
            worker = self._worker.setdefault(kind, _Counts(WORKER_KEEP))
            guesses[rank, depth], chance = _estimate(worker, mine.get(kind), depth, guess)
            found.append(chance * (1.0 if parent == ROOT else found[parent]))
        return found

    def _guess(self, draft: Draft) -> float:
        """Returns the initial estimate of a kind: that of the next worse grade that was judged."""
        for grade in range(draft.grade - 1, -1, -1):
            if (worse := self._worker.get((draft.source, grade, 0))) is not None and worse.judged:
                return worse.chance(0, FIRST_GUESS, 1.0)
        return FIRST_GUESS

    def judge(
        self, seq: int, draft: Draft, accepted: int, rows: Sequence[int] = (), known: Container[int] = ()
    ) -> None:
        """Learns that the target accepted the first ``accepted`` tokens of ``draft``, as far as it was verified.

        Of a tree, ``rows`` are the accepted rows of the step (``tree.walked``). The nodes ``known`` were judged
        before.
        """
        if not draft.parents:
            for at in range(min(len(draft.tokens), accepted + 1)):
                if at not in known:
                    self._note(seq, (draft.source, draft.grade, 0), at, at < accepted)
            return
        stood = {row: depth for depth, row in enumerate(rows)}
        for node, (parent, rank) in enumerate(zip(draft.parents, ranks(draft.parents), strict=True)):
            if node not in known and (depth := stood.get(parent + 1)) is not None:
                self._note(seq, (draft.source, draft.grade, rank), depth, node + 1 in stood)

    def _note(self, seq: int, kind: Kind, at: int, stood: bool) -> None:
        self._worker.setdefault(kind, _Counts(WORKER_KEEP)).note(at, stood)
        self._own.setdefault(seq, {}).setdefault(kind, _Counts(OWN_KEEP)).note(at, stood)

    def end(self, seq: int) -> None:
        """Forgets the verdicts of the sequence ``seq``."""
        self._own.pop(seq, None)


def _estimate(worker: _Counts, own: _Counts | None, at: int, guess: float) -> tuple[float, float]:
    """Returns the worker's estimate for position ``at``, and the cautious one to count on, with the sequence's own
    verdicts.
    """
    usual = worker.chance(at, guess, 1.0)
    chance = max(usual - CAUTION * worker.doubt(at, usual, 1.0), LEAST_SURE * usual)
    return usual, chance if own is None else own.chance(at, chance, OWN_WEIGHT)


def expected(cumulative: Sequence[float]) -> float:
    """Returns the expected number of accepted tokens of a draft with these ``cumulative`` probabilities."""
    return sum(cumulative)
