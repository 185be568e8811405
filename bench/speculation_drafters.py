"""The drafters of ``bench.speculation``: one that knows the script, one of a fixed depth, and one that counts.

Knows nothing of what is timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from baton.engine.speculate.draft import Draft, SequenceView, Speculator
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.judge import Writer
from baton.engine.speculate.names import AUTO, speculators
from bench.speculation_texts import Scripts


class Oracle(Speculator):
    """Proposes the script, each token right by ``chance``."""

    def __init__(self, scripts: Scripts, chance: float, seed: int = 0) -> None:
        self._chance = chance
        self.follow(scripts, seed)

    def follow(self, scripts: Scripts, seed: int) -> None:
        """Proposes other ``scripts`` from now on; ``seed`` decides which of their tokens are wrong."""
        self._scripts, self._rng = scripts, random.Random(seed)

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        """Returns what comes next, spoiled."""
        script = self._scripts[text.request.request_id]
        coming = script[text.outputs : text.outputs + budget]
        return Draft([t if self._rng.random() < self._chance else t ^ 1 for t in coming], "oracle", 0)

    def end(self, text: SequenceView) -> None:
        """Does nothing, because an oracle keeps nothing of a sequence."""


class Fixed(Drafter):
    """Verifies ``depth`` drafts of each sequence, always."""

    def __init__(self, speculator: Oracle, depth: int) -> None:
        super().__init__([speculator])
        self._speculator, self._depth = speculator, depth

    def plan(self, writers: Sequence[Writer], prompt_tokens: int = 0, limit_s: float = 0.0) -> dict[int, Draft]:
        """Returns a draft for everybody."""
        drafts = {one.seq: self._speculator.propose(one, min(self._depth, one.draft_room)) for one in writers}
        return {seq: draft for seq, draft in drafts.items() if draft is not None and draft.tokens}


class Counted(Drafter):
    """Is the drafter of ``--speculation auto``, which counts steps, and those that it lengthened by drafts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(speculators(AUTO), clock, trees=True)
        self.steps = self.drafted = 0

    def plan(self, writers: Sequence[Writer], prompt_tokens: int = 0, limit_s: float = 0.0) -> dict[int, Draft]:
        """Returns a step's drafts."""
        found = super().plan(writers, prompt_tokens, limit_s)
        self.steps += 1
        self.drafted += bool(found)
        return found
