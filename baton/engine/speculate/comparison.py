"""Counts a worker's drafts, and measures what they gain by comparing steps with drafts to a small share without.

Knows nothing of models, nor of how drafts are chosen. At intervals, a stretch of steps drafts nothing; its tokens
per second, compared to those of the other stretches, say how much faster answers are written. Stretches alternate,
so that the machine's drift and changes of the batch affect both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.speculate.draft import MOST_DRAFTS, Draft

STRETCH = 16  # steps without drafts in a row, so that the caches are as they would be


class Arm(NamedTuple):
    """Counts the results of one kind of step."""

    tokens: int = 0  # tokens of answers
    seconds: float = 0.0  # of the steps, and of making their drafts


class Comparison:
    """Counts tokens and seconds of steps with and without drafts since the start; a ``share`` of the steps draft
    nothing, 0 for none.
    """

    def __init__(self, share: float) -> None:
        self._every = round(STRETCH / share) if share else 0
        self._step = 0
        self._is_control = False
        self._tokens, self._seconds = [0, 0], [0.0, 0.0]  # of steps with drafts, and of those without

    @property
    def is_control(self) -> bool:
        """Returns whether the present step drafts nothing."""
        return self._is_control

    @property
    def drafts(self) -> Arm:
        """Returns the tokens and seconds of steps that may draft."""
        return Arm(self._tokens[False], self._seconds[False])

    @property
    def control(self) -> Arm:
        """Returns the tokens and seconds of steps that draft nothing."""
        return Arm(self._tokens[True], self._seconds[True])

    def begin(self) -> bool:
        """Begins a step; returns whether it is to draft nothing."""
        self._step += 1
        self._is_control = bool(self._every) and self._step % self._every >= self._every - STRETCH
        return self._is_control

    def add(self, tokens: int, seconds: float) -> None:
        """Adds to the tokens and seconds of the present step's kind."""
        self._tokens[self._is_control] += tokens
        self._seconds[self._is_control] += seconds


class Tally(NamedTuple):
    """Counts drafts since the start."""

    proposed: int = 0  # drafts that speculators proposed
    drafts: int = 0  # drafts that were verified
    verified: int = 0  # tokens
    accepted: int = 0  # tokens
    seconds: float = 0.0  # spent on making drafts

    def verified_one(self, tokens: int, accepted: int) -> Tally:
        """Returns the counts with one more draft, of whose ``tokens`` the target accepted ``accepted``."""
        done = self.verified + tokens, self.accepted + accepted
        return self._replace(drafts=self.drafts + 1, verified=done[0], accepted=done[1])


class Places:
    """Counts verified tokens by their place in the draft: those that were ``judged``, and those that ``stood``."""

    def __init__(self) -> None:
        self.judged, self.stood = [0] * MOST_DRAFTS, [0] * MOST_DRAFTS

    def add(self, draft: Draft, accepted: int, rows: Sequence[int]) -> None:
        """Adds a verified draft of which ``accepted`` tokens stood; of a tree, ``rows`` are the accepted rows."""
        went_on = not draft.parents or rows[-1] - 1 in draft.parents
        for at in range(min(len(draft.tokens), accepted + 1) if went_on else accepted):
            self.judged[at] += 1
            self.stood[at] += at < accepted
