"""Measures the gain of speculation by comparing steps with drafts to a small share of steps without.

Knows nothing of drafts or models. At intervals, a stretch of steps drafts nothing; its tokens per second, compared
to those of the other stretches, say how much faster answers are written. Stretches alternate, so that the machine's
drift and changes of the batch affect both alike.
"""

from __future__ import annotations

from typing import NamedTuple

STRETCH = 16  # steps without drafts in a row, so that the caches are as they would be


class Arm(NamedTuple):
    """Counts the results of one kind of step."""

    tokens: int = 0  # tokens of answers
    seconds: float = 0.0  # of the steps, and of making their drafts


class Comparison:
    """Counts tokens and seconds of steps with and without drafts since the start; a ``share`` of the steps draft
    nothing, 0 for none.
    """

    def __init__(self, share: float) -> None:
        self._every = round(STRETCH / share) if share else 0
        self._step = 0
        self._is_control = False
        self._tokens, self._seconds = [0, 0], [0.0, 0.0]  # of steps with drafts, and of those without

    @property
    def is_control(self) -> bool:
        """Returns whether the present step drafts nothing."""
        return self._is_control

    @property
    def drafts(self) -> Arm:
        """Returns the tokens and seconds of steps that may draft."""
        return Arm(self._tokens[False], self._seconds[False])

    @property
    def control(self) -> Arm:
        """Returns the tokens and seconds of steps that draft nothing."""
        return Arm(self._tokens[True], self._seconds[True])

    def begin(self) -> bool:
        """Begins a step; returns whether it is to draft nothing."""
        self._step += 1
        self._is_control = bool(self._every) and self._step % self._every >= self._every - STRETCH
        return self._is_control

    def add(self, tokens: int, seconds: float) -> None:
        """Adds to the tokens and seconds of the present step's kind."""
        self._tokens[self._is_control] += tokens
        self._seconds[self._is_control] += seconds
