"""When to verify one draft more than pays: seldom, and ever more seldom while that brings nothing.

Without it, what once didn't pay would never be tried again. Knows nothing of drafts. A probe's step is longer, so
they are few: by luck alone, where less than a third of them stand, they stay as far apart as they can be, and no
run of luck makes more of them than ``MOST_SAVED`` beside one in ``SHARE`` steps.
"""

from __future__ import annotations

FIRST, LAST = 4, 512  # steps between two probes
FASTER = 4  # what the distance is divided by after a probe that stood
SLOWER = 2  # and multiplied by after one that fell
SHARE = 200  # steps that pay for a probe: half a percent, below what a 99th percentile sees
MOST_SAVED = 12  # probes that may come sooner: what a start or a change of traffic takes


class Probe:
    """One worker's probes."""

    def __init__(self) -> None:
        self._every = FIRST
        self._wait = FIRST
        self._saved = float(MOST_SAVED)

    def due(self, steps: int = 1) -> bool:
        """``steps`` more were planned: whether the last may hold a probe."""
        self._wait -= steps
        self._saved = min(self._saved + steps / SHARE, MOST_SAVED)
        return self._wait <= 0 and self._saved >= 1.0

    def begun(self) -> None:
        """The planned step holds a probe."""
        self._wait = self._every
        self._saved -= 1.0

    def made(self, stood: bool) -> None:
        """A probe was verified; ``stood`` says whether its token was accepted."""
        self._every = max(FIRST, self._every // FASTER) if stood else min(LAST, SLOWER * self._every)
        self._wait = self._every
