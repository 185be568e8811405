"""Compares steps with drafts and steps without, as they come: what speculation really brings, by a small share.

Knows nothing of drafts or models. Every so often a stretch of steps drafts nothing; its tokens per second, beside
those of the other stretches, say how much faster answers are written. Stretches take turns, so that the machine's
drift and changes of the batch meet both alike.
"""

from __future__ import annotations

from typing import NamedTuple

STRETCH = 16  # steps without drafts in a row, so that the caches are as they would be


class Arm(NamedTuple):
    """Counts what was written in one kind of stretch: tokens, and the seconds of their steps and their drafts."""

    tokens: int = 0
    seconds: float = 0.0


class Comparison:
    """Counts steps of both kinds since the start; ``share`` of them draft nothing, 0: none."""

    def __init__(self, share: float) -> None:
        self._every = round(STRETCH / share) if share else 0
        self._step = 0
        self._is_control = False
        self._tokens, self._seconds = [0, 0], [0.0, 0.0]  # of steps with drafts, and of those without

    @property
    def is_control(self) -> bool:
        """Tells whether the present step drafts nothing."""
        return self._is_control

    @property
    def drafts(self) -> Arm:
        """Returns what the steps brought that may draft."""
        return Arm(self._tokens[False], self._seconds[False])

    @property
    def control(self) -> Arm:
        """Returns what the steps brought that draft nothing."""
        return Arm(self._tokens[True], self._seconds[True])

    def begin(self) -> bool:
        """Begins a step; returns whether it is to draft nothing."""
        self._step += 1
        self._is_control = bool(self._every) and self._step % self._every >= self._every - STRETCH
        return self._is_control

    def add(self, tokens: int, seconds: float) -> None:
        """Counts what the present step wrote or took."""
        self._tokens[self._is_control] += tokens
        self._seconds[self._is_control] += seconds
