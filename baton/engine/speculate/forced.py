"""Drafts what a grammar forces: where only one text may follow, its tokens are known before the model writes them.

Knows nothing of grammars. The text's usual tokens are proposed; others that spell it are left to the model.
"""

from __future__ import annotations

from baton.engine.speculate.draft import GRADES, Draft, SequenceView, Speculator

NAME = "forced"


class ForcedDrafts(Speculator):
    """Drafts the tokens that a sequence's grammar forces ("jump forward")."""

    name = NAME

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        """Returns the forced tokens; None where several texts may follow, or without a grammar."""
        found = text.forced
        return Draft(found[:budget], NAME, GRADES - 1) if found else None

    def end(self, text: SequenceView) -> None:
        """Does nothing, because nothing is remembered."""
