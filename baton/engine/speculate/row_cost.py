"""What a step costs by its rows: learned from the steps that were run.

Knows nothing of drafts. For each number of rows that was seen it keeps a faded mean of the time's logarithm;
between them it interpolates, beyond them it goes on with their slope, or a hopeful one. All follow the machine's
drift together.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

NEW = 0.02  # weight of a step's time in what is known of its rows alone
DRIFT = 0.1  # of its deviation that all rows' times follow: their ratios hardly change, the machine's speed does
KNOWN = 8  # steps after which a deviation is the machine's rather than ours
MOST_OFF = math.log(2.0)  # a step that deviates by more (a hiccup) counts as this much
# Of log time by log rows, beyond what was seen at most. Costs rise in stairs, and what is thought too dear is never
# tried: one step corrects a hope, and none a fear.
FIRST_SLOPE = 0.5
RENEW = 8  # steps between two renewals of what is interpolated
MOST_ROWS = 1024

Vector = NDArray[np.float64]
LOG_ROWS: Vector = np.log(np.maximum(np.arange(MOST_ROWS + 1), 1))


class RowCost:
    """Seconds of steps without prompt tokens, by rows."""

    def __init__(self) -> None:
        self._log: dict[int, float] = {}  # less ``_drift``, which all have in common
        self._drift = 0.0
        self._seen: dict[int, int] = {}
        self._curve: Vector = np.empty(0)
        self._stale = 0

    @property
    def known(self) -> bool:
        """Whether any step was seen."""
        return bool(self._log)

    def observe(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` rows took ``seconds``."""
        if seconds <= 0.0 or rows > MOST_ROWS:
            return
        now, seen = math.log(seconds) - self._drift, self._seen.get(rows, 0)
        if not self._log:
            self._log[rows] = now
        before = self._log.get(rows)
        if before is None:
            before = math.log(self.seconds(rows, 0)[0]) - self._drift
        off = max(-MOST_OFF, min(MOST_OFF, now - before))
        if seen >= KNOWN:
            self._drift += DRIFT * off
        self._log[rows] = before + max(NEW, 1 / (seen + 1)) * off
        self._seen[rows] = seen + 1
        self._stale += 1
        if seen == 0 or self._stale >= RENEW:
            self._curve, self._stale = np.empty(0), 0

    def seconds(self, rows: int, more: int) -> Vector:
        """Returns the seconds of ``rows``, ``rows + 1``, … ``rows + more`` rows; never falling."""
        if not len(self._curve):
            self._curve = self._interpolated()
        if rows + more <= MOST_ROWS:
            return self._curve[rows : rows + more + 1]
        return self._curve[np.minimum(np.arange(rows, rows + more + 1), MOST_ROWS)]

    def _interpolated(self) -> Vector:
        """By rows, 0 … MOST_ROWS. Where a mean of more rows is less, fewer rows cost no more than that."""
        known = sorted(self._log)
        x, y = np.log(known), np.array([self._log[rows] + self._drift for rows in known])
        y = np.minimum.accumulate(y[::-1])[::-1]
        slope = FIRST_SLOPE
        if len(known) > 1:
            slope = min(FIRST_SLOPE, max(0.0, float((y[-1] - y[0]) / (x[-1] - x[0]))))
        beyond = np.maximum(LOG_ROWS - x[-1], 0.0) * slope
        return np.exp(np.interp(LOG_ROWS, x, y) + beyond)
