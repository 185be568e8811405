"""Drafts what followed the longest match with a text's last tokens, in the text itself and in the tenant's recent
answers.

Knows nothing of models or costs. Source: "SuffixDecoding" (https://arxiv.org/abs/2411.04975), with the longest
match's latest continuation in place of counts, and a search of strings in place of suffix trees.
"""

from __future__ import annotations

from baton.engine.speculate.corpus import FOUR, Corpus
from baton.engine.speculate.draft import Draft, SequenceView, Speculator, graded
from baton.engine.speculate.text_search import LONGEST, PAIR, Match, SearchableText, following, spelled

NAME = "suffix"
CATCH_UP = 2048  # tokens of its own text added by one call: 16 us
READ = 512  # tokens of ended answers read by one call: 4 us


class Suffix(Speculator):
    """Drafts by matches in recent answers and, if ``own``, in the text's own tokens (which ``prompt_lookup``
    searches as well).
    """

    name = NAME

    def __init__(self, own: bool = True, corpus: Corpus | None = None) -> None:
        self.corpus = corpus or Corpus()
        self._own = own
        self._known: dict[int, SearchableText] = {}

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        """Returns the tokens that followed the longest match with the text's end, in the text or in the tenant's
        answers; None without a match.
        """
        if self.corpus.waiting:
            self.corpus.read(READ)
        found = [self.corpus.match(_tenant(text), spelled(text.tokens[-LONGEST:])), self._own_match(text)]
        best = max((one for one in found if one is not None), key=lambda one: one.length, default=None)
        if best is None:
            return None
        tokens = following(best, budget)
        return Draft(tokens, NAME, graded(best.length)) if tokens else None

    def read_prompt(self, text: SequenceView, idle: bool) -> int:
        """Adds part of the prompt to what is searched, if the text itself is; returns the number of tokens
        added.
        """
        if not self._own:
            return 0
        known = self._of(text)
        behind = known.behind
        known.catch_up(CATCH_UP)
        return behind - known.behind

    def end(self, text: SequenceView) -> None:
        """Forgets the text; its answer is queued for the tenant's corpus."""
        self._known.pop(text.seq, None)
        tokens = text.tokens
        self.corpus.take(_tenant(text), tokens[len(tokens) - text.outputs :])

    def _own_match(self, text: SequenceView) -> Match | None:
        if not self._own:
            return None
        known = self._of(text)
        known.catch_up(CATCH_UP)
        length = len(text.tokens)
        return known.longest(FOUR, length) or known.longest(PAIR, length)

    def _of(self, text: SequenceView) -> SearchableText:
        if (known := self._known.get(text.seq)) is None:
            known = self._known[text.seq] = SearchableText(text.tokens)
        return known


def _tenant(text: SequenceView) -> bytes:
    request = text.request
    return request.tenant_salt + b"/" + request.adapter_id.encode()
