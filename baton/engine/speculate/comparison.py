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
        self.drafts, self.control = Arm(), Arm()
        self._every = round(STRETCH / share) if share else 0
        self._step = 0
        self._is_control = False
        self._pending = Arm()

    @property
    def is_control(self) -> bool:
        """Tells whether the present step drafts nothing."""
        return self._is_control

    def begin(self) -> bool:
        """Begins a step, and so ends the last one; returns whether it is to draft nothing."""
        self.end()
        self._step += 1
        self._is_control = bool(self._every) and self._step % self._every >= self._every - STRETCH
        return self._is_control

    def add(self, tokens: int, seconds: float) -> None:
        """Counts what the present step wrote or took."""
        self._pending = Arm(self._pending.tokens + tokens, self._pending.seconds + seconds)

    def end(self) -> None:
        """Counts the present step to its kind."""
        arm = self.control if self._is_control else self.drafts
        total = Arm(arm.tokens + self._pending.tokens, arm.seconds + self._pending.seconds)
        if self._is_control:
            self.control = total
        else:
            self.drafts = total
        self._pending = Arm()
