"""Counts the drafts of a worker, for operators. Knows nothing of how they are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.speculate.draft import MOST_DRAFTS, Draft


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
