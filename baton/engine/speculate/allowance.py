"""Decides whether a step may hold drafts that could lengthen it in vain.

Knows nothing of drafts or of who proposes them. It counts in plain steps, those without drafts. What drafts gained
of late may be risked again. Beyond that, a step with drafts is paid for from what plain steps save up. So steps
lengthened in vain are fewer than a 99th percentile sees, and lose a bounded share of the time, however wrong the
estimates are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SHARE = 500  # plain steps that save up for a step lengthened in vain: a 99th percentile sees one in a hundred
MOST_SAVED = 2.0  # steps saved up at most: what is lost in a row stays below a hundredth of a few hundred steps
FIRST_SAVED = (
    12.0  # steps that a new worker may lose, to tell apart drafts that stand by a third and those that don't
)
START = 64  # steps in which what is left of these is forfeited
PROVEN = 1.0  # net gain that isn't luck: several of the last steps with drafts brought more than they cost
MOST_EARNED = 4.0  # gained steps that may be risked: when drafts that paid begin to fail, no more is lost by them


class Allowance:
    """Keeps account of the gains and losses of one worker's drafts."""

    def __init__(self) -> None:
        self._saved, self._earned = FIRST_SAVED, 0.0

    @property
    def is_new(self) -> bool:
        """Returns whether there is still something to be lost of what a new worker may lose."""
        return self._saved > MOST_SAVED

    def save(self, steps: int) -> None:
        """Records that ``steps`` more steps were run."""
        if self.is_new:
            self._saved = max(MOST_SAVED, self._saved - steps * (FIRST_SAVED - MOST_SAVED) / START)
        else:
            self._saved = min(self._saved + steps / SHARE, MOST_SAVED)

    def allows(self, extra: float) -> bool:
        """Returns whether a step may be run that takes ``extra`` of a plain one more."""
        return self._earned >= PROVEN or self._saved >= 1.0 + extra

    def settle(self, gain: float) -> None:
        """Records a step with drafts: what they brought less what they cost, in plain steps."""
        if gain < 0.0 and self._earned < PROVEN:
            self._saved -= 1.0 - gain
        self._earned = min(max(self._earned + gain, 0.0), MOST_EARNED)


class Stake(NamedTuple):
    """Holds a step with drafts and what was verified of them; ``seconds[k]`` is the duration of a step with k
    drafts.
    """

    sequences: int
    seconds: NDArray[np.float64]
    verified: int = 0
    accepted: int = 0

    def judged(self, verified: int, accepted: int) -> Stake:
        """Returns the stake with ``verified`` more tokens, of which ``accepted`` were accepted."""
        return self._replace(verified=self.verified + verified, accepted=self.accepted + accepted)

    @property
    def gain(self) -> float:
        """Returns what the drafts brought less what they cost, in steps without drafts."""
        return self.accepted / self.sequences - lengthened(self.seconds, self.verified)


def lengthened(seconds: NDArray[np.float64], drafts: int) -> float:
    """Returns the share of a step without drafts that ``drafts`` drafts add to it."""
    return float(seconds[min(drafts, len(seconds) - 1)] / seconds[0]) - 1.0
