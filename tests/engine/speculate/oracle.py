"""A speculator that knows the answers and spoils some of them, and a drafter that takes whatever it gets."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from baton.engine.speculate.draft import BatchSpeculator, Draft, SequenceView, Speculator
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.judge import Writer


class Oracle(Speculator):
    """Proposes what the answers will be, each token right by ``chance``; of unknown requests nothing."""

    def __init__(self, answers: Mapping[str, Sequence[int]], chance: float, vocab_size: int, seed: int = 0) -> None:
        self._answers, self._chance, self._vocab = answers, chance, vocab_size
        self._rng = random.Random(seed)

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        answer = self._answers.get(text.request.request_id, ())
        coming = answer[text.outputs : text.outputs + budget]
        tokens = [t if self._rng.random() < self._chance else (t + 1) % self._vocab for t in coming]
        return Draft(tokens, "oracle", 0) if tokens else None

    def end(self, text: SequenceView) -> None:
        """Does nothing, because nothing is remembered."""


class Eager(Drafter):
    """Verifies drafts of random length at each step, whatever that costs."""

    def __init__(
        self, speculator: Speculator, most: int = 8, seed: int = 0, by_rejection: bool = False, trees: bool = False
    ) -> None:
        super().__init__([speculator], by_rejection=by_rejection, trees=trees)
        self._speculator, self._most, self._lengths = speculator, most, random.Random(seed)

    def plan(self, writers: Sequence[Writer], prompt_tokens: int = 0, limit_s: float = 0.0) -> dict[int, Draft]:
        self._forget_ended()
        found = dict[int, Draft]()
        if isinstance(self._speculator, BatchSpeculator):
            self._speculator.prepare([writer for writer in writers if writer.draft_room], self._most)
        for writer in writers:
            budget = min(writer.draft_room, self._lengths.randint(0, self._most))
            if budget and (draft := self._speculator.propose(writer, budget)) is not None:
                found[writer.seq] = draft
        return found


class Bushy(Oracle):
    """Proposes trees: at some places the right token, if the draft has it, stands among wrong ones."""

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        answer = self._answers.get(text.request.request_id, ())
        coming, rng = list(answer[text.outputs : text.outputs + budget]), self._rng
        if not coming:
            return None
        paths = [self._path(coming, rng.randint(1, len(coming))) for _ in range(rng.randint(1, 4))]
        return Draft.of_paths(paths, "oracle", 0)

    def _path(self, coming: list[int], length: int) -> list[int]:
        """Returns the coming tokens, wrong from some place on."""
        right = next((at for at in range(length) if self._rng.random() >= self._chance), length)
        return coming[:right] + [self._rng.randrange(self._vocab) for _ in range(length - right)]
