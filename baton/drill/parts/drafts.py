"""Speculation in a simulated engine: the product's drafter and look-ups, beside a speculator that knows the answer.

A paced engine's tokens are hashes, so that look-ups alone would draft next to nothing that stands. Knows nothing of
pages or of how drafts are verified.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from baton.drill.language import oracle
from baton.engine.speculate.draft import GRADES, Draft, LearningSpeculator, SequenceView
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.names import AUTO, speculators

NAME = "oracle"
SILENT = 0.1  # share of the calls in which nothing is drafted


class KnowingSpeculator(LearningSpeculator):
    """Drafts what the oracle answers; each token is right with probability ``right``, else any other.

    Being a speculator that learns, it makes the drafter try its drafts before they are known to pay.
    """

    name = NAME

    def __init__(self, rng: random.Random, right: float, sight: oracle.Sight) -> None:
        self._rng, self._right, self._sight = rng, right, sight
        self._answers: dict[int, list[int]] = {}  # of running sequences

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        """Returns up to ``budget`` tokens of the answer, some of them wrong; now and then None."""
        coming = self._answer(text)[text.outputs : text.outputs + budget]
        if not coming or self._rng.random() < SILENT:
            return None
        tokens = [token if self._rng.random() < self._right else self._other(token) for token in coming]
        return Draft(tokens, NAME, self._rng.randrange(GRADES))

    def verified(self, text: SequenceView, draft: Sequence[int], chosen: Sequence[int]) -> None:
        """Does nothing, because the oracle has nothing to learn."""

    def end(self, text: SequenceView) -> None:
        """Forgets the answer of a sequence that ended."""
        self._answers.pop(text.seq, None)

    def _answer(self, text: SequenceView) -> list[int]:
        if text.seq not in self._answers:
            asked = text.request
            prompt, on = asked.token_ids[: asked.prompt_tokens], asked.adapter_id
            self._answers[text.seq] = oracle.answer(prompt, asked.sampling, asked.choice, on, self._sight)[0]
        return self._answers[text.seq]

    def _other(self, token: int) -> int:
        return (token + self._rng.randrange(1, oracle.VOCABULARY)) % oracle.VOCABULARY


def drafter(rng: random.Random, right: float, clock: Callable[[], float], sight: oracle.Sight) -> Drafter | None:
    """Returns the product's drafter with a speculator whose tokens are right with probability ``right``, and with
    the usual look-ups; None if that is 0. ``clock`` gives seconds, ``sight`` is the model's.
    """
    if not right:
        return None
    return Drafter((KnowingSpeculator(rng, right, sight), *speculators(AUTO)), clock, control_share=0.01)
