"""What a speculator is and what it proposes. Torch-free.

Knows nothing of models, batches or costs: a draft is a guess at the next tokens, and the target model has the last
word on each of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.protos.nouns import EngineRequest

GRADES = 8
MOST_DRAFTS = 16  # of one sequence in one step, as kernels/speculative_accept looks at


class Text(Protocol):
    """A sequence as speculators see it; ``tokens`` is the prompt, then the answer so far, and only grows."""

    @property
    def seq(self) -> int:
        """The sequence's number, unique among those that live."""

    @property
    def request(self) -> EngineRequest:
        """What was asked for."""

    @property
    def tokens(self) -> Sequence[int]:
        """Every token so far."""

    @property
    def outputs(self) -> int:
        """Tokens of the answer so far."""


class Draft(NamedTuple):
    """Tokens that may come next. ``source`` names who proposes them.

    ``grade`` (0 … GRADES - 1) orders one source's drafts by confidence; what a grade is worth is learned from what
    the target model accepts.
    """

    tokens: Sequence[int]
    source: str
    grade: int


class Speculator(ABC):
    """Proposes drafts. Whatever it remembers of a sequence it can rebuild from the sequence's tokens.

    ``name`` is its drafts' source.
    """

    name = ""

    @abstractmethod
    def propose(self, text: Text, budget: int) -> Draft | None:
        """Returns at most ``budget`` tokens that may follow, or None where it has no guess."""

    @abstractmethod
    def end(self, text: Text) -> None:
        """Forgets a sequence that ended, or learns from it."""


class BatchSpeculator(Speculator):
    """Works on all sequences at once. ``round_s``: seconds that one more token of each takes, so far."""

    round_s = 0.0

    @abstractmethod
    def prepare(self, texts: Sequence[Text], budget: int) -> None:
        """Says whom ``propose`` will be asked for next, and for how many tokens."""


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
