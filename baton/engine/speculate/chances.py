"""How likely each token of a draft is to be accepted: learned from what was, per kind of draft and per sequence.

Knows nothing of costs or of how drafts are made. A chance is that of one token if all before it stand; old
judgements fade. A kind is a source and a grade; what is known of the worker's sequences is where a new one begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.engine.speculate.draft import Draft

FIRST_GUESS = 0.5
WORKER_KEEP, OWN_KEEP = 1 - 1 / 64, 1 - 1 / 16  # a judgement's weight after one more
OWN_WEIGHT = 2.0  # judgements of a sequence's own that weigh as much as the worker's estimate
CAUTION = 0.5  # standard errors that an estimate is lowered by: what is unsure is left to probes
LEAST = 0.005  # drafts whose chance is below this aren't weighed up at all

Kind = tuple[str, int]


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

    def judge(self, drafted: int, accepted: int) -> None:
        looked_at = min(drafted, accepted + 1)
        while len(self._tried) < looked_at:
            self._stood.append(0.0)
            self._tried.append(0.0)
        for at in range(looked_at):
            self._stood[at] = self._stood[at] * self._keep + (at < accepted)
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
        kind = draft.source, draft.grade
        worker = self._worker.setdefault(kind, _Counts(WORKER_KEEP))
        own = self._own.get(seq, {}).get(kind)
        found, before, all_stand = list[float](), self._guess(draft), 1.0
        for at in range(len(draft.tokens)):
            before = worker.chance(at, before, 1.0)
            chance = before - CAUTION * worker.doubt(at, before, 1.0)
            if own is not None:
                chance = own.chance(at, chance, OWN_WEIGHT)
            all_stand *= chance
            if all_stand < LEAST:
                break
            found.append(all_stand)
        return found

    def _guess(self, draft: Draft) -> float:
        """Where a kind begins: as the next worse one that was judged."""
        for grade in range(draft.grade - 1, -1, -1):
            if (worse := self._worker.get((draft.source, grade))) is not None and worse.judged:
                return worse.chance(0, FIRST_GUESS, 1.0)
        return FIRST_GUESS

    def judge(self, seq: int, draft: Draft, accepted: int) -> None:
        """The target accepted the first ``accepted`` tokens of what was verified of ``draft``."""
        kind, drafted = (draft.source, draft.grade), len(draft.tokens)
        self._worker.setdefault(kind, _Counts(WORKER_KEEP)).judge(drafted, accepted)
        self._own.setdefault(seq, {}).setdefault(kind, _Counts(OWN_KEEP)).judge(drafted, accepted)

    def end(self, seq: int) -> None:
        """Forgets the judgements of the sequence ``seq``."""
        self._own.pop(seq, None)


def expected(cumulative: Sequence[float]) -> float:
    """Returns how many tokens of a draft are expected to stand."""
    return sum(cumulative)
