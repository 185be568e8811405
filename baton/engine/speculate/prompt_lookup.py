"""Drafts what followed earlier occurrences of the last tokens in the prompt, the answer so far or the client's
prediction.

Knows nothing of other requests. Source: "inference with reference" (https://arxiv.org/abs/2304.04487) and prompt
look-up decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.engine.speculate.draft import GRADES, Draft, SequenceView, Speculator, graded
from baton.engine.speculate.text_search import GAP, Match, SearchableText, following, spelled

NAME = "prompt_lookup"
CATCH_UP = READ = 2048  # tokens added by one call: 16 us
OTHERS, OTHERS_DEPTH = 3, 4  # further continuations in a tree, and tokens of each


class PromptLookup(Speculator):
    """Drafts by prompt look-up; a client's prediction of the answer is searched as well."""

    name = NAME

    def __init__(self) -> None:
        self._known: dict[int, SearchableText] = {}

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
        matches = known.matches(len(text.tokens))
        if not matches:
            return None
        best = max(matches, key=lambda match: match.length)  # of equal ones the latest
        found = following(best, budget)
        if not found:
            return None
        if self.branches and len(matches) > 1:
            return Draft.of_paths([found, *_others(best, matches, budget)], NAME, graded(best.length))
        return Draft(found, NAME, graded(best.length))

    def read_prompt(self, text: SequenceView, idle: bool) -> int:
        """Adds part of the prompt to what is searched; returns the number of tokens added."""
        known = self._of(text)
        behind = known.behind
        known.catch_up(READ)
        return behind - known.behind

    def end(self, text: SequenceView) -> None:
        """Forgets the text of a sequence that ended."""
        self._known.pop(text.seq, None)

    def _of(self, text: SequenceView) -> SearchableText:
        if (known := self._known.get(text.seq)) is None:
            prediction = text.request.prediction
            before = spelled(prediction) + GAP if prediction else ""
            known = self._known[text.seq] = SearchableText(text.tokens, before)
        return known


def _others(best: Match, matches: Sequence[Match], budget: int) -> Iterator[list[int]]:
    """Yields continuations of other matches that begin with another token, those of the longest matches first."""
    begun = {best.text[best.end]}
    for match in sorted(matches, key=lambda match: -match.length):
        if match.text[match.end] not in begun and len(begun) <= OTHERS:
            begun.add(match.text[match.end])
            yield following(match, min(budget, OTHERS_DEPTH))


def _begun(text: SequenceView, budget: int) -> Draft | None:
    """Returns a draft of the prediction while the answer, too short for a look-up, agrees with it; else None."""
    prediction, outputs = text.request.prediction, text.outputs
    if outputs >= 2 or len(prediction) <= outputs:
        return None
    if tuple(text.tokens[len(text.tokens) - outputs :]) != prediction[:outputs]:
        return None
    return Draft(prediction[outputs : outputs + budget], NAME, GRADES - 1)
