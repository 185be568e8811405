"""Drafts from suffix automata: of each text itself, and of the tenant's recent answers.

Knows nothing of models or costs. Source: "SuffixDecoding" (https://arxiv.org/abs/2411.04975), with the longest
match's latest continuation in place of counts.
"""

from __future__ import annotations

from baton.engine.speculate.automaton import SuffixAutomaton
from baton.engine.speculate.corpus import GAP, Corpus
from baton.engine.speculate.draft import Draft, SequenceView, Speculator, graded
from baton.engine.speculate.pairs import following

NAME = "suffix"
CATCH_UP = 64  # tokens of its own text read by one call: 0.1 ms
READ = 8  # pieces of ended answers read by one call, some four tokens
LEAST = 2  # tokens of the shortest match that counts
LOOK_BACK = 16  # tokens of a text by which its place in the corpus is found again


class Suffix(Speculator):
    """Drafts by suffix automata. If ``own`` is False, a text's own tokens are not searched (``prompt_lookup`` does
    that).
    """

    name = NAME

    def __init__(self, own: bool = True, corpus: Corpus | None = None) -> None:
        self.corpus = corpus or Corpus()
        self._own = own
        self._known: dict[int, _DraftState] = {}

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        """Returns the tokens that followed the longest match with the text's end, in the text or in the tenant's
        answers; None without a match.
        """
        if self.corpus.waiting:
            self.corpus.read(READ)
        known = self._of(text)
        own = known.match() if self._own else NO_MATCH
        automaton, end, length = max(own, known.place.match(self.corpus, text), key=lambda found: found[2])
        if automaton is None or length < LEAST:
            return None
        found = following(automaton.tokens, end, budget)
        if GAP in found:
            found = found[: found.index(GAP)]
        return Draft(found, NAME, graded(length)) if found else None

    def read_prompt(self, text: SequenceView, idle: bool) -> int:
        """Adds part of the prompt to the text's automaton, if its own tokens are searched; returns the number of
        tokens added.
        """
        return self._of(text).read() if self._own else 0

    def end(self, text: SequenceView) -> None:
        """Forgets the text; its answer is queued for the tenant's corpus."""
        self._known.pop(text.seq, None)
        tokens = text.tokens
        self.corpus.take(_tenant(text), tokens[len(tokens) - text.outputs :])

    def _of(self, text: SequenceView) -> _DraftState:
        if (known := self._known.get(text.seq)) is None:
            known = self._known[text.seq] = _DraftState(text)
        return known


Match = tuple[SuffixAutomaton | None, int, int]  # automaton, end position, length in tokens
NO_MATCH: Match = (None, 0, 0)


class _DraftState:
    """Holds the state of one text: its own automaton, and its place in the tenant's."""

    def __init__(self, text: SequenceView) -> None:
        self._text = text
        self._own = SuffixAutomaton()
        self.place = _Place()

    def match(self) -> Match:
        """Returns the earlier match of the text's end in its own tokens, once all of them were read."""
        self.read()
        own = self._own
        return (own, *own.earlier) if len(own) == len(self._text.tokens) else NO_MATCH

    def read(self) -> int:
        """Adds some more of the text; returns the number of tokens added."""
        own, tokens = self._own, self._text.tokens
        before = len(own)
        for at in range(before, min(len(tokens), before + CATCH_UP)):
            own.append(tokens[at])
        return len(own) - before


class _Place:
    """Holds the state at which a text's end stands in each automaton of its tenant."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[int, int]] = {}
        self._read = 0

    def match(self, corpus: Corpus, text: SequenceView) -> Match:
        """Returns the longest match over all automata, after following the text's new tokens."""
        automata, tokens = corpus.automata(_tenant(text)), text.tokens
        fresh = tokens[max(self._read, len(tokens) - LOOK_BACK) :]
        states, best = dict[int, tuple[int, int]](), NO_MATCH
        for automaton in automata:
            known = self._states.get(id(automaton))
            state, length = known or (0, 0)
            for token in fresh if known else tokens[-LOOK_BACK:]:
                state, length = automaton.follow(state, length, token)
            states[id(automaton)] = state, length
            if length >= max(LEAST, best[2]):
                best = automaton, automaton.end(state), length
        self._states, self._read = states, len(tokens)
        return best


def _tenant(text: SequenceView) -> bytes:
    request = text.request
    return request.tenant_salt + b"/" + request.adapter_id.encode()
