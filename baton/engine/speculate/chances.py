"""How likely each token of a draft is to be accepted: learned from what was, per kind of draft and per sequence.

Knows nothing of costs or of how drafts are made. A chance is that of one token if all before it stand; old
judgements fade. A kind is a source and a grade; what is known of the worker's sequences is where a new one begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.engine.speculate.draft import Draft
from baton.engine.speculate.tree import ROOT, depths, ranks

FIRST_GUESS = 0.5
WORKER_KEEP, OWN_KEEP = 1 - 1 / 64, 1 - 1 / 16  # a judgement's weight after one more
OWN_WEIGHT = 2.0  # judgements of a sequence's own that weigh as much as the worker's estimate
CAUTION = 0.5  # standard errors that an estimate is lowered by: what is unsure is left to probes
LEAST_SURE = 0.25  # of an estimate that stays however unsure it is: else what is rare would never be tried
LEAST = 0.005  # drafts whose chance is below this aren't weighed up at all

SECOND = 0.3  # of what is left by the first guess: where a second one begins, a third one of what that leaves

Kind = tuple[str, int, int]  # who, how sure, and how many guesses at the same place are thought likelier


class _Counts:
    """Faded counts by position in the draft."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._stood: list[float] = []
        self._tried: list[float] = []

    @property
    def judged(self) -> bool:
        """Whether anything was."""
        return bool(self._tried)

    def note(self, at: int, stood: bool) -> None:
        """A draft at place ``at`` was looked at."""
        while len(self._tried) <= at:
            self._stood.append(0.0)
            self._tried.append(0.0)
        self._stood[at] = self._stood[at] * self._keep + stood
        self._tried[at] = self._tried[at] * self._keep + 1.0

    def chance(self, at: int, guess: float, weight: float) -> float:
        """The estimate for position ``at``; ``guess`` counts as ``weight`` judgements."""
        if at >= len(self._tried):
            return guess
        return (self._stood[at] + weight * guess) / (self._tried[at] + weight)

    def doubt(self, at: int, chance: float, weight: float) -> float:
        """The standard error of that estimate."""
        tried = self._tried[at] if at < len(self._tried) else 0.0
        return math.sqrt(chance * (1.0 - chance) / (tried + weight))


class Chances:
    """Judgements of all drafts of one worker."""

    def __init__(self) -> None:
        self._worker: dict[Kind, _Counts] = {}
        self._own: dict[int, dict[Kind, _Counts]] = {}

    def cumulative(self, seq: int, draft: Draft) -> list[float]:
        """Returns the chance that each token of ``draft`` stands, all before it included; cut where it vanishes."""
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

    def _of_tree(self, seq: int, draft: Draft) -> list[float]:
        """Of every node: its own chance beside its siblings, times its parent's."""
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
        """Where a kind begins: as the next worse one that was judged."""
        for grade in range(draft.grade - 1, -1, -1):
            if (worse := self._worker.get((draft.source, grade, 0))) is not None and worse.judged:
                return worse.chance(0, FIRST_GUESS, 1.0)
        return FIRST_GUESS

    def judge(self, seq: int, draft: Draft, accepted: int, rows: Sequence[int] = ()) -> None:
        """The target accepted the first ``accepted`` tokens of what was verified of ``draft``.

        Of a tree ``rows`` are those that stand (``tree.walked``).
        """
        if not draft.parents:
            for at in range(min(len(draft.tokens), accepted + 1)):
                self._note(seq, (draft.source, draft.grade, 0), at, at < accepted)
            return
        stood = {row: depth for depth, row in enumerate(rows)}
        for node, (parent, rank) in enumerate(zip(draft.parents, ranks(draft.parents), strict=True)):
            if (depth := stood.get(parent + 1)) is not None:
                self._note(seq, (draft.source, draft.grade, rank), depth, node + 1 in stood)

    def _note(self, seq: int, kind: Kind, at: int, stood: bool) -> None:
        self._worker.setdefault(kind, _Counts(WORKER_KEEP)).note(at, stood)
        self._own.setdefault(seq, {}).setdefault(kind, _Counts(OWN_KEEP)).note(at, stood)

    def end(self, seq: int) -> None:
        """Forgets the judgements of the sequence ``seq``."""
        self._own.pop(seq, None)


def _estimate(worker: _Counts, own: _Counts | None, at: int, guess: float) -> tuple[float, float]:
    """The worker's estimate for place ``at``, and the chance that is counted on."""
    usual = worker.chance(at, guess, 1.0)
    chance = max(usual - CAUTION * worker.doubt(at, usual, 1.0), LEAST_SURE * usual)
    return usual, chance if own is None else own.chance(at, chance, OWN_WEIGHT)


def expected(cumulative: Sequence[float]) -> float:
    """Returns how many tokens of a draft are expected to stand."""
    return sum(cumulative)
