"""What a speculator is and what it proposes. Torch-free.

Knows nothing of models, batches or costs: a draft is a guess at the next tokens, and the target model has the last
word on each of them.
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

GRADES = 8
MOST_DRAFTS = 16  # deep, of one sequence in one step, as kernels/speculative_accept looks at
MOST_NODES = 32  # of one sequence's tree
States = NDArray[np.float32]


class Text(Protocol):
    """A sequence as speculators see it; ``tokens`` is the prompt, then the answer so far, and only grows."""

    @property
    def seq(self) -> int:
        """Returns the sequence's number, unique among those that live."""

    @property
    def request(self) -> EngineRequest:
        """Returns what the client asked for."""

    @property
    def tokens(self) -> Sequence[int]:
        """Returns every token so far."""

    @property
    def outputs(self) -> int:
        """Returns the number of tokens of the answer so far."""


class Draft(NamedTuple):
    """Holds tokens that may come next. ``source`` names who proposes them.

    ``grade`` (0 … GRADES - 1) orders one source's drafts by confidence; what a grade is worth is learned from what
    the target model accepts. ``spreads`` are the probabilities by which each token was drawn, none where unknown.
    With ``parents`` (``tree.py``) the tokens are a tree, without a chain.
    """

    tokens: Sequence[int]
    source: str
    grade: int
    spreads: Sequence[States] = ()
    parents: Sequence[int] = ()

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[int]], source: str, grade: int) -> Draft:
        """Returns the draft of several continuations, the most promising first."""
        tokens, parents = tree_of(paths, MOST_NODES)
        return cls(tokens, source, grade, parents=() if first_chain(parents) == len(parents) else parents)

    def cut(self, depth: int) -> Draft:
        """Returns the draft of the next ``depth`` places."""
        if not self.parents:
            return self._replace(tokens=self.tokens[:depth])
        return self.of([node for node, deep in enumerate(depths(self.parents)) if deep < depth])

    def chain(self) -> Draft:
        """Returns the draft without second guesses."""
        return self._replace(tokens=self.tokens[: first_chain(self.parents)], parents=()) if self.parents else self

    def of(self, nodes: Sequence[int]) -> Draft:
        """Returns the draft of the tokens at ``nodes``, with each of which its parent is there."""
        if not self.parents:
            return self._replace(tokens=self.tokens[: len(nodes)])
        tokens, parents = pruned(self.tokens, self.parents, nodes)
        return self._replace(tokens=tokens, parents=() if first_chain(parents) == len(parents) else parents)

    def paths(self) -> list[Sequence[int]]:
        """Returns for each token the tokens up to it, itself included, that follow one another."""
        if not self.parents:
            return [self.tokens[:count] for count in range(1, len(self.tokens) + 1)]
        return [[self.tokens[at] for at in path_to(node, self.parents)] for node in range(len(self.tokens))]

    def stands(self, chosen: Sequence[int]) -> Sequence[int]:
        """Returns the rows of the step that stand, the text's own first; ``chosen[row]`` is what follows a row."""
        if self.parents:
            return walked(self.tokens, self.parents, chosen)
        return range(accepted(self.tokens, chosen[:-1]) + 1)

    def judged(self, position: int) -> DraftedToken:
        """Returns the token at ``position`` as it is judged by rejection."""
        return DraftedToken(self.tokens[position], self.spreads[position] if self.spreads else None)


class Speculator(ABC):
    """Proposes drafts of sequences; whatever it remembers of one it can rebuild from the sequence's tokens.

    ``name`` is its drafts' source; ``branches``: several tokens may be proposed at the same place.
    """

    name = ""
    branches = False

    @abstractmethod
    def propose(self, text: Text, budget: int) -> Draft | None:
        """Returns at most ``budget`` tokens that may follow, or None where it has no guess."""

    @abstractmethod
    def end(self, text: Text) -> None:
        """Forgets a sequence that ended, or learns from it."""

    def read_ahead(self, text: Text, idle: bool) -> int:
        """Reads some of a prompt before its answer begins; returns the tokens read, 0 where there is no more.

        With ``idle`` nothing else is to do meanwhile; else it should take no longer than a look-up.
        """
        return 0


class LearningSpeculator(Speculator):
    """Drafts from what the model chose in earlier steps, behind rejected drafts too."""

    @abstractmethod
    def verified(self, text: Text, draft: Sequence[int], chosen: Sequence[int]) -> None:
        """Reports a step, before its tokens join ``text``: ``chosen[i]`` follows ``text`` and ``draft[:i]``."""


class BatchSpeculator(Speculator):
    """Works on all sequences at once. ``round_s``: seconds that one more token of each takes, so far."""

    round_s = 0.0

    @abstractmethod
    def prepare(self, texts: Sequence[Text], budget: int) -> None:
        """Says whom ``propose`` will be asked for next, and for how many tokens."""


class StateSpeculator(BatchSpeculator):
    """Drafts from the target's hidden states: those before ``layers``, side by side in a row of each position.

    A layer's number behind the last one means the states that the head reads. ``every_row``: it wants the rows of
    prompts as well; else those that choose a token.
    """

    layers: tuple[int, ...] = ()
    every_row = False

    @abstractmethod
    def saw(self, text: Text, first: int, states: States) -> None:
        """Takes the states of positions ``first``, ``first`` + 1, … of ``text``, none of a rejected draft."""


def graded(length: int) -> int:
    """Returns the grade of a match of ``length`` tokens, two at least: a finer scale for short ones."""
    for grade, most in enumerate((2, 3, 4, 6, 10, 16, 32)):
        if length <= most:
            return grade
    return GRADES - 1


def accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Returns how many leading ``drafts`` are the target's own choices (kernels/speculative_accept, by choice)."""
    for count, (draft, choice) in enumerate(zip(drafts, chosen, strict=False)):
        if draft != choice:
            return count
    return min(len(drafts), len(chosen))
