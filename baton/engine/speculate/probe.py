"""Decides when to verify one draft more than pays, ever more seldom while such probes fail.

Knows nothing of drafts. Without probes, a draft length that once didn't pay would never be tried again. A probe
makes its step longer, so they are few: if less than a third of them are accepted, their distance stays at its
maximum, and a run of luck adds no more than ``MOST_SAVED`` to one in ``SHARE`` steps.
"""

from __future__ import annotations

FIRST, LAST = 4, 512  # steps between two probes
FASTER = 4  # divides the distance after an accepted probe
SLOWER = 2  # multiplies the distance after a rejected one
SHARE = 200  # steps that pay for a probe: half a percent, below what a 99th percentile sees
MOST_SAVED = 12  # probes that may be saved up, enough for a start or a change of traffic


class Probe:
    """Schedules the probes of one worker."""

    def __init__(self) -> None:
        self._every = FIRST
        self._wait = FIRST
        self._saved = float(MOST_SAVED)

    def due(self, steps: int = 1) -> bool:
        """Counts ``steps`` more steps; returns whether the last of them may hold a probe."""
        self._wait -= steps
        self._saved = min(self._saved + steps / SHARE, MOST_SAVED)
        return self._wait <= 0 and self._saved >= 1.0

    def begun(self) -> None:
        """Records that the planned step holds a probe."""
        self._wait = self._every
        self._saved -= 1.0

    def made(self, stood: bool) -> None:
        """Records that a probe was verified; ``stood`` says whether its token was accepted."""
        self._every = max(FIRST, self._every // FASTER) if stood else min(LAST, SLOWER * self._every)
        self._wait = self._every
