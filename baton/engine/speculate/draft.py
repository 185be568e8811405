"""Defines speculators and the drafts that they propose. Torch-free.

Knows nothing of models, batches or costs: a draft is a guess at the next tokens, each of which the target model
accepts or rejects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.engine.plan import DraftedToken
from baton.engine.speculate.tree import depths, first_chain, path_to, pruned, tree_of, walked
from baton.protos.nouns import EngineRequest

GRADES = 8  # levels of confidence
MOST_DRAFTS = 16  # places ahead in one sequence's draft, as many as kernels/speculative_accept takes
MOST_NODES = 32  # of one sequence's tree
States = NDArray[np.float32]


class SequenceView(Protocol):
    """Is a sequence as speculators see it; ``tokens`` is the prompt, then the answer so far, and only grows."""

    @property
    def seq(self) -> int:
        """Returns the sequence's number, unique among running sequences."""

    @property
    def request(self) -> EngineRequest:
        """Returns the request that the sequence answers."""

    @property
    def tokens(self) -> Sequence[int]:
        """Returns all tokens so far, prompt first."""

    @property
    def outputs(self) -> int:
        """Returns the number of tokens of the answer so far."""

    @property
    def forced(self) -> Sequence[int]:
        """Returns tokens that spell what the answer's grammar lets follow; empty if several texts may follow."""


class Draft(NamedTuple):
    """Holds tokens that may come next. ``source`` is the name of the speculator that proposes them.

    ``grade`` (0 … GRADES - 1) orders one source's drafts by confidence; the acceptance rate of a grade is learned.
    ``spreads`` are the probabilities (vocab,) float32 with which each token was drawn, empty if unknown.
    ``parents`` (``tree.py``) makes the tokens a tree; empty for a chain.
    """

    tokens: Sequence[int]
    source: str
    grade: int
    spreads: Sequence[States] = ()
    parents: Sequence[int] = ()

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[int]], source: str, grade: int) -> Draft:
        """Returns the draft of several continuations, the most promising first, as a tree of at most MOST_NODES
        tokens.
        """
        tokens, parents = tree_of(paths, MOST_NODES)
        return cls(tokens, source, grade, parents=() if first_chain(parents) == len(parents) else parents)

    def cut(self, depth: int) -> Draft:
        """Returns the draft limited to the next ``depth`` places."""
        if not self.parents:
            return self._replace(tokens=self.tokens[:depth])
        return self.of([node for node, deep in enumerate(depths(self.parents)) if deep < depth])

    def chain(self) -> Draft:
        """Returns the draft with one guess per place, the first path of a tree."""
        return self._replace(tokens=self.tokens[: first_chain(self.parents)], parents=()) if self.parents else self

    def of(self, nodes: Sequence[int]) -> Draft:
        """Returns the draft of the tokens at ``nodes``, which must include the parent of each; of a chain, the
        first ``len(nodes)``.
        """
        if not self.parents:
            return self._replace(tokens=self.tokens[: len(nodes)])
        tokens, parents = pruned(self.tokens, self.parents, nodes)
        return self._replace(tokens=tokens, parents=() if first_chain(parents) == len(parents) else parents)

    def paths(self) -> list[Sequence[int]]:
        """Returns, for each token, the drafted tokens from the first place to that token, itself included."""
        if not self.parents:
            return [self.tokens[:count] for count in range(1, len(self.tokens) + 1)]
        return [[self.tokens[at] for at in path_to(node, self.parents)] for node in range(len(self.tokens))]

    def stands(self, chosen: Sequence[int]) -> Sequence[int]:
        """Returns the accepted rows of the step, row 0 (the last known token) first; ``chosen[row]`` is the
        target's token after a row.
        """
        if self.parents:
            return walked(self.tokens, self.parents, chosen)
        return range(accepted(self.tokens, chosen[:-1]) + 1)

    def judged(self, position: int) -> DraftedToken:
        """Returns the token at index ``position`` of the draft with its probabilities, for rejection sampling."""
        return DraftedToken(self.tokens[position], self.spreads[position] if self.spreads else None)


class Speculator(ABC):
    """Proposes drafts of sequences; any state it keeps for a sequence can be rebuilt from the sequence's tokens.

    ``name`` is its drafts' source; ``branches`` allows several tokens at the same place.
    """

    name = ""
    branches = False

    @abstractmethod
    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        """Returns a draft for the sequence, at most ``budget`` places deep, or None without a guess.

        After a call for a sequence, there may be further ones for what it was some tokens before.
        """

    @abstractmethod
    def end(self, text: SequenceView) -> None:
        """Forgets a sequence that ended; may learn from its answer."""

    def read_prompt(self, text: SequenceView, idle: bool) -> int:
        """Processes part of a prompt before its answer begins; returns the number of tokens processed, 0 if nothing
        is left.

        If ``idle``, the engine has nothing else to do; otherwise the call should take no longer than a look-up.
        """
        return 0


class LearningSpeculator(Speculator):
    """Is the base of speculators that learn from the target's choices in earlier steps, those after rejected drafts
    included.
    """

    @abstractmethod
    def verified(self, text: SequenceView, draft: Sequence[int], chosen: Sequence[int]) -> None:
        """Takes the results of a step, before its tokens join ``text``: ``chosen[i]`` is the target's token after
        ``text`` and ``draft[:i]``.
        """


class BatchSpeculator(Speculator):
    """Is the base of speculators that draft for all sequences at once. ``round_s`` estimates the seconds for one
    more token of each.
    """

    round_s = 0.0

    @abstractmethod
    def prepare(self, texts: Sequence[SequenceView], budget: int) -> None:
        """Announces the sequences that ``propose`` is asked for next, and the most tokens for each."""


class StateSpeculator(BatchSpeculator):
    """Is the base of speculators that draft from the target's hidden states before ``layers``, side by side in one
    row per position.

    The number of layers, as an entry, stands for the states that the head reads. ``every_row`` asks for the rows of
    prompts as well, otherwise rows that choose a token are passed alone.
    """

    layers: tuple[int, ...] = ()
    every_row = False

    @abstractmethod
    def saw(self, text: SequenceView, first: int, states: States) -> None:
        """Takes the states (rows, layers x hidden) of positions ``first``, ``first`` + 1, … of ``text``; positions
        of rejected drafts are left out.
        """


def graded(length: int) -> int:
    """Returns the grade (0 … GRADES - 1) of a match of ``length`` tokens, at least two; short matches are told
    apart more finely.
    """
    for grade, most in enumerate((2, 3, 4, 6, 10, 16, 32)):
        if length <= most:
            return grade
    return GRADES - 1


def accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Returns how many leading ``drafts`` equal the target's own choices (acceptance by choice)."""
    for count, (draft, choice) in enumerate(zip(drafts, chosen, strict=False)):
        if draft != choice:
            return count
    return min(len(drafts), len(chosen))
