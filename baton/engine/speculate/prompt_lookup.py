"""Drafts what followed earlier occurrences of the last tokens in the prompt, the answer so far or the client's
prediction.

Knows nothing of other requests. Source: "inference with reference" (https://arxiv.org/abs/2304.04487) and prompt
look-up decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.engine.speculate.draft import GRADES, Draft, SequenceView, Speculator, graded
from baton.engine.speculate.pairs import Match, PairIndex, following

NAME = "prompt_lookup"
CATCH_UP = READ = 512  # tokens indexed by one call, in 0.1 ms: calls that bring nothing are too few for less
OTHERS, OTHERS_DEPTH = 3, 4  # further continuations in a tree, and tokens of each
NOTHING = -1  # separator between a prediction and the prompt, no token id


class PromptLookup(Speculator):
    """Drafts by prompt look-up; a client's prediction of the answer is searched as well."""

    name = NAME

    def __init__(self) -> None:
        self._known: dict[int, _DraftState] = {}

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        """Returns the tokens that followed the longest of the latest matches with the text's end; None if there is
        no match.

        A tree has other matches' continuations as well. While the answer has less than two tokens, its prediction's
        beginning is drafted.
        """
        known = self._of(text)
        known.catch_up(CATCH_UP)
        if (begun := _begun(text, budget)) is not None:
            return begun
        matches = known.index.matches()
        if not matches:
            return None
        best = max(matches, key=lambda match: match.length)  # of equal ones the latest
        found = known.behind(best, budget)
        if not found:
            return None
        if self.branches and len(matches) > 1:
            return Draft.of_paths([found, *known.others(best, matches, budget)], NAME, graded(best.length))
        return Draft(found, NAME, graded(best.length))

    def read_prompt(self, text: SequenceView, idle: bool) -> int:
        """Indexes part of the prompt; returns the number of tokens indexed."""
        known = self._of(text)
        behind = known.index.behind
        known.catch_up(READ)
        return behind - known.index.behind

    def end(self, text: SequenceView) -> None:
        """Forgets the text's index."""
        self._known.pop(text.seq, None)

    def _of(self, text: SequenceView) -> _DraftState:
        if (known := self._known.get(text.seq)) is None:
            known = self._known[text.seq] = _DraftState(text)
        return known


class _DraftState:
    """Holds one text's index. A prediction, if there is one, is put before the text in a list of its own."""

    def __init__(self, text: SequenceView) -> None:
        self._text = text.tokens
        prediction = text.request.prediction
        self._own = [*prediction, NOTHING, *text.tokens] if prediction else None
        self._before = len(prediction) + 1 if prediction else 0
        self.tokens: Sequence[int] = self._text if self._own is None else self._own
        self.index = PairIndex(self.tokens)

    def behind(self, match: Match, count: int) -> list[int]:
        """Returns ``count`` tokens that followed a match, fewer if the prediction ends."""
        found = following(self.tokens, match.end, count)
        return found[: found.index(NOTHING)] if NOTHING in found else found

    def others(self, best: Match, matches: Sequence[Match], budget: int) -> Iterator[list[int]]:
        """Yields continuations of other matches that begin with another token, those of the longest matches
        first.
        """
        begun = {self.tokens[best.end]}
        for match in sorted(matches, key=lambda match: -match.length):
            if self.tokens[match.end] not in begun and len(begun) <= OTHERS:
                begun.add(self.tokens[match.end])
                yield self.behind(match, min(budget, OTHERS_DEPTH))

    def catch_up(self, most: int) -> None:
        """Indexes up to ``most`` more tokens."""
        if self._own is not None:
            self._own += self._text[len(self._own) - self._before :]
        self.index.catch_up(most)


def _begun(text: SequenceView, budget: int) -> Draft | None:
    """Returns a draft of the prediction while the answer, too short for a look-up, agrees with it; else None."""
    prediction, outputs = text.request.prediction, text.outputs
    if outputs >= 2 or len(prediction) <= outputs:
        return None
    if tuple(text.tokens[len(text.tokens) - outputs :]) != prediction[:outputs]:
        return None
    return Draft(prediction[outputs : outputs + budget], NAME, GRADES - 1)
