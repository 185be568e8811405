"""When to verify one draft more than pays: seldom, and ever more seldom while that brings nothing.

Without it, what once didn't pay would never be tried again. Knows nothing of drafts.
"""

from __future__ import annotations

FIRST, LAST = 4, 512  # steps between two probes


class Probe:
    """One worker's probes."""

    def __init__(self) -> None:
        self._every = FIRST
        self._wait = FIRST

    def due(self) -> bool:
        """One more step was planned: whether it may hold a probe."""
        self._wait -= 1
        return self._wait <= 0

    def begun(self) -> None:
        """The planned step holds a probe."""
        self._wait = self._every

    def made(self, stood: bool) -> None:
        """A probe was verified; ``stood`` says whether its token was accepted."""
        self._every = FIRST if stood else min(LAST, 2 * self._every)
        self._wait = self._every
