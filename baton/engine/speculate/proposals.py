"""Asks a worker's speculators for drafts, and picks the most promising of each text.

Knows nothing of whom to ask, nor of what may be risked.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.speculate.acceptance import AcceptanceEstimate, expected
from baton.engine.speculate.draft import MOST_DRAFTS, BatchSpeculator, Draft, SequenceView, Speculator
from baton.engine.speculate.judge import WeighedDraft, Writer
from baton.engine.speculate.row_cost import Vector


class Proposals:
    """Returns the drafts of ``speculators``, weighed by ``chances``. ``trees`` and ``by_rejection`` are those of
    ``Drafter``.
    """

    def __init__(
        self, speculators: Sequence[Speculator], chances: AcceptanceEstimate, trees: bool, by_rejection: bool
    ) -> None:
        self._speculators, self._chances = speculators, chances
        self._trees, self._by_rejection = trees, by_rejection

    def likeliest(self, seq: int, drafts: Sequence[Draft]) -> Draft:
        """Returns the draft whose first token is the likeliest to be accepted."""
        return drafts[0] if len(drafts) == 1 else max(drafts, key=lambda one: self._chances.first(seq, one))

    def weighed(self, asked: Sequence[Writer], seconds: Vector, sequences: int) -> list[WeighedDraft]:
        """Returns each sequence's most promising draft."""
        if not asked:
            return []
        for speculator in self._speculators:
            if isinstance(speculator, BatchSpeculator):
                speculator.prepare(asked, self._rounds(speculator, asked, seconds, sequences))
        return [best for text in asked if (best := self._best(text)) is not None]

    def _rounds(self, speculator: BatchSpeculator, asked: Sequence[Writer], seconds: Vector, sequences: int) -> int:
        """Returns the number of tokens per sequence for which drafting and verifying pays best; at least 1, else
        nothing is learned.
        """
        guess = Draft([0] * MOST_DRAFTS, speculator.name, 0)
        room = min(MOST_DRAFTS, max(text.draft_room for text in asked))
        chances = [self._chances.cumulative(text.seq, guess) for text in asked]
        brought, best, rounds = float(sequences), 0.0, 1
        for count in range(1, room + 1):
            brought += sum(one[count - 1] for one in chances if count <= len(one))
            took = float(seconds[min(count * len(asked), len(seconds) - 1)]) + count * speculator.round_s
            if brought / took > best:
                best, rounds = brought / took, count
        return rounds

    def _best(self, text: Writer) -> WeighedDraft | None:
        drafts, chances = self.of(text), self._chances
        weighed = [WeighedDraft.of(text, one, chances.cumulative(text.seq, one)) for one in drafts]
        return max(weighed, key=lambda one: expected(one.chances), default=None)

    def of(self, text: Writer) -> list[Draft]:
        """Returns the speculators' drafts of ``text``, cut to chains where branches can't be verified."""
        most = min(MOST_DRAFTS, text.draft_room)
        found = [draft for one in self._speculators if (draft := one.propose(text, most)) is not None]
        return found if self._branches(text) else [draft.chain() for draft in found]

    def _branches(self, text: SequenceView) -> bool:
        """Returns whether several guesses at a place can be verified; by rejection or with a grammar they can't."""
        sampling = text.request.sampling
        return self._trees and sampling.grammar is None and not (self._by_rejection and sampling.temperature)
