"""Learns a step's duration by its number of rows, from the steps that were run.

Knows nothing of drafts. For each number of rows seen it keeps a faded mean of the duration's logarithm; between
them it interpolates in a straight line, and beyond them it extrapolates with their slope, or an optimistic one. A
common factor follows the machine's drift.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

NEW = 0.02  # weight of a step's duration in the mean for its number of rows
DRIFT = 0.1  # share of a deviation that moves all means, because the machine's speed changes more than their ratios
KNOWN = 8  # steps after which a deviation counts as the machine's drift
MOST_OFF = math.log(2.0)  # a step that deviates by more (a hiccup) counts as this much
# Slope of log time by log rows beyond the most rows seen. Costs rise in stairs, and a number of rows that seems too
# expensive is never tried: one step corrects an optimistic estimate, none a pessimistic one.
FIRST_SLOPE = 0.1
GROWTH = 2  # times as many rows as were seen, at most, are tried
RENEW = 8  # steps between two interpolations
STALE = 4096  # observed steps in which a number of rows has to be seen again, else it is forgotten
# Observed steps for which the duration of a number of rows is remembered once it was seen, doubled each time that
# it is seen again. So one step that was slow by chance doesn't keep others of as many rows away for long.
REMEMBERED = 256
MOST_ROWS = 1024  # rows of a step up to which costs are kept

Vector = NDArray[np.float64]
LOG_ROWS: Vector = np.log(np.maximum(np.arange(MOST_ROWS + 1), 1))


def remembered(seen: int) -> int:
    """Returns for how many steps the duration of a number of rows is remembered that was ``seen`` so often."""
    return min(STALE, REMEMBERED << min(seen - 1, 16))


class RowCost:
    """Estimates the duration of steps without prompt tokens by their number of rows."""

    def __init__(self) -> None:
        self._log: dict[int, float] = {}  # less ``_drift``, which all have in common
        self._drift = 0.0
        self._seen: dict[int, int] = {}  # steps since it was forgotten, by number of rows
        self._ever: dict[int, int] = {}  # steps since the start
        self._steps = 0
        self._last: dict[int, int] = {}  # by number of rows: the step that had them
        self._curve: Vector = np.empty(0)
        self._stale = 0

    @property
    def known(self) -> bool:
        """Returns whether any step was seen."""
        return bool(self._log)

    def observe(self, rows: int, seconds: float) -> None:
        """Records that a step of ``rows`` rows took ``seconds``."""
        if seconds <= 0.0 or rows > MOST_ROWS:
            return
        now, seen = math.log(seconds) - self._drift, self._seen.get(rows, 0)
        if not self._log:
            self._log[rows] = now
        before = self._log.get(rows)
        if before is None:
            before = math.log(self.of(rows)) - self._drift
        off = max(-MOST_OFF, min(MOST_OFF, now - before))
        if seen >= KNOWN:
            self._drift += DRIFT * off
        self._log[rows] = before + max(NEW, 1 / (seen + 1)) * off
        self._seen[rows], self._ever[rows] = seen + 1, self._ever.get(rows, 0) + 1
        self._steps += 1
        self._last[rows] = self._steps
        self._stale += 1
        if seen == 0 or self._stale >= RENEW:
            self._curve, self._stale = np.empty(0), 0

    def reach(self, rows: int) -> int:
        """Returns the most rows that a step may have whose duration is estimated: twice as many as were seen, or as
        ``rows``, because estimates far beyond are guesses.
        """
        return GROWTH * max(rows, max(self._log, default=0))

    def of(self, rows: int) -> float:
        """Returns the estimated seconds of a step with ``rows`` rows; it interpolates only if none was seen."""
        known = self._log.get(rows)
        return float(self.seconds(rows, 0)[0]) if known is None else math.exp(known + self._drift)

    def seconds(self, rows: int, more: int) -> Vector:
        """Returns the estimated seconds, float64 (more + 1,), of steps with ``rows``, ``rows + 1``, … ``rows +
        more`` rows; never falling.
        """
        last = min(rows + more, MOST_ROWS)
        if len(self._curve) <= last:
            self._forget()
            self._curve = self._interpolated(last)
        if rows + more <= MOST_ROWS:
            return self._curve[rows : rows + more + 1]
        return self._curve[np.minimum(np.arange(rows, rows + more + 1), MOST_ROWS)]

    def _forget(self) -> None:
        """Drops what was seen long ago, or a few times and not of late, so that a number of rows that once seemed
        too expensive is tried again. The most rows are dropped only after STALE steps, because costs beyond are
        guessed to be low, and the fewest never, because costs rise from theirs.
        """
        fewest, most = min(self._log), max(self._log)
        for rows, last in list(self._last.items()):
            kept = STALE if rows == most else remembered(self._ever[rows])
            if rows != fewest and self._steps - last > kept:
                del self._last[rows], self._log[rows], self._seen[rows]

    def _interpolated(self, last: int) -> Vector:
        """Returns the seconds for 0 … ``last`` rows; fewer rows never cost more than more rows."""
        known = sorted(self._log)
        x, y = LOG_ROWS[known], np.array([self._log[rows] + self._drift for rows in known])
        y = np.minimum.accumulate(y[::-1])[::-1]
        slope = FIRST_SLOPE
        if len(known) > 1:
            slope = min(FIRST_SLOPE, max(0.0, float((y[-1] - y[0]) / (x[-1] - x[0]))))
        beyond = np.maximum(LOG_ROWS[: last + 1] - x[-1], 0.0) * slope
        found: Vector = np.interp(np.arange(last + 1), known, np.exp(y)) * np.exp(beyond)
        return found
