"""Decides when to verify one draft more than pays, ever more seldom while such probes fail.

Knows nothing of drafts, nor of what may be risked (``allowance.py``). Without probes, a draft length that once
didn't pay would never be tried again. A probe makes its step longer, so they are few: if less than a third of them
are accepted, their distance stays at its maximum.
"""

from __future__ import annotations

FIRST, LAST = 4, 512  # steps between two probes
FASTER = 4  # divides the distance after an accepted probe
SLOWER = 2  # multiplies the distance after a rejected one


class Probe:
    """Schedules the probes of one worker."""

    def __init__(self) -> None:
        self._every = FIRST
        self._wait = FIRST

    def due(self, steps: int = 1) -> bool:
        """Counts ``steps`` more steps; returns whether the last of them may hold a probe."""
        self._wait -= steps
        return self._wait <= 0

    def begun(self) -> None:
        """Records that the planned step holds a probe."""
        self._wait = self._every

    def made(self, stood: bool) -> None:
        """Records that a probe was verified; ``stood`` says whether its token was accepted."""
        self._every = max(FIRST, self._every // FASTER) if stood else min(LAST, SLOWER * self._every)
        self._wait = self._every
