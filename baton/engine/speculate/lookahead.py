"""Drafts from Jacobi iterations: the model's choices after wrong guesses make the next guesses.

Knows nothing of prompts' repetitions or of other requests. Every row of a step yields the model's token after some
tokens; those after rejected drafts would be thrown away, and are kept as n-grams. Source: "Lookahead decoding"
(https://arxiv.org/abs/2402.02057). Its window of guesses is the draft itself, a chain, because a sequence's rows
attend to all rows before them, so that there is no second branch beside the one that is verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.speculate.draft import Draft, LearningSpeculator, SequenceView

NAME = "lookahead"
MOST_NGRAMS = 4096  # of a text, some 150 bytes each; the oldest go
BLIND, ITERATED, ONE_TOKEN, TWO_TOKENS = range(4)  # grades: the origin of a draft's first token
Gram = tuple[int, ...]


class Lookahead(LearningSpeculator):
    """Drafts from n-grams of the model's choices after earlier drafts of the same text."""

    name = NAME

    def __init__(self) -> None:
        self._known: dict[int, _DraftState] = {}

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        """Returns a draft of ``budget`` tokens: from the text's n-grams, else from the last iteration's guesses,
        else repeated tokens.
        """
        known = self._known.setdefault(text.seq, _DraftState())
        tokens, grade = known.guess(text.tokens, budget)
        return Draft(tokens, NAME, grade) if tokens else None

    def verified(self, text: SequenceView, draft: Sequence[int], chosen: Sequence[int]) -> None:
        """Stores the choices after ``draft``'s tokens as n-grams, whichever speculator drafted them."""
        self._known.setdefault(text.seq, _DraftState()).learn(text.tokens, draft, chosen)

    def end(self, text: SequenceView) -> None:
        """Forgets the text's n-grams and guesses."""
        self._known.pop(text.seq, None)


class _DraftState:
    """Holds one text's n-grams, and the guesses of its last iteration."""

    def __init__(self) -> None:
        self._next: dict[Gram, int] = {}
        self._left: list[int] = []  # guesses for the places from ``_at`` on
        self._at = 0

    def learn(self, text: Sequence[int], draft: Sequence[int], chosen: Sequence[int]) -> None:
        """Stores n-grams: ``chosen[i]`` is the model's token after ``text`` and ``draft[:i]``."""
        rows = [*text[-2:], *draft]
        first = len(rows) - len(draft)
        for at, token in enumerate(chosen):
            before = rows[max(0, first + at - 2) : first + at]
            self._keep(tuple(before), token)
            self._keep(tuple(before[-1:]), token)
        self._left, self._at = list(chosen), len(text)

    def guess(self, text: Sequence[int], budget: int) -> tuple[list[int], int]:
        """Returns at most ``budget`` tokens after ``text``, and the first one's grade."""
        left = self._left[len(text) - self._at :] if len(text) >= self._at else []
        found, first = list[int](), BLIND
        for at in range(budget):
            before = [*text[-2:], *found][-2:]
            token, grade = self._following(before)
            if token is None and at < len(left):
                token, grade = left[at], ITERATED
            if token is None:
                token, grade = text[at - min(budget, len(text))] if text else None, BLIND
            if token is None:
                break
            found.append(token)
            first = grade if at == 0 else first
        return found, first

    def _following(self, before: Sequence[int]) -> tuple[int | None, int]:
        for size, grade in ((2, TWO_TOKENS), (1, ONE_TOKEN)):
            if len(before) >= size and (token := self._next.get(tuple(before[-size:]))) is not None:
                return token, grade
        return None, BLIND

    def _keep(self, before: Gram, token: int) -> None:
        self._next.pop(before, None)  # so that it counts as new
        self._next[before] = token
        if len(self._next) > MOST_NGRAMS:
            del self._next[next(iter(self._next))]
