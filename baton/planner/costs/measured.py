"""Cost curves fitted to a worker's measured steps: non-negative least squares on relative errors. Torch-free, pure.

Knows nothing of how the steps were measured. A measurement of prompts may span several steps; its pairs are those
of the whole prompts (they add up over chunks).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.protos.errors import InvalidRequest
from baton.protos.measurements import StepCurve

COLUMNS = StepCurve.__struct_fields__
LEAST_POINTS = 4  # points; fewer give no curve


class StepTiming(msgspec.Struct, frozen=True):
    """Describes ``steps`` engine steps that took ``seconds`` in all, and what they computed.

    ``pairs`` are query-key pairs of prefill; ``context`` is KV tokens read by decoding sequences, over all steps.
    """

    what: str
    steps: float
    prefill_tokens: float
    pairs: float
    sequences: float
    context: float
    seconds: float

    @property
    def features(self) -> tuple[float, ...]:
        """Returns the numbers by which a StepCurve's coefficients are multiplied, in its order."""
        return self.steps, self.prefill_tokens, self.pairs, self.sequences, self.context


def fit(points: Sequence[StepTiming]) -> StepCurve:
    """Returns the StepCurve with the least squares of relative errors.

    Raises InvalidRequest for fewer than LEAST_POINTS points.
    """
    sound = [p for p in points if p.seconds > 0]
    if len(sound) < LEAST_POINTS:
        raise InvalidRequest(f"{len(sound)} points were measured; a curve needs {LEAST_POINTS} at least", "points")
    rows = np.array([p.features for p in sound]) / np.array([p.seconds for p in sound])[:, None]
    return StepCurve(*_non_negative(rows))


def predicted(curve: StepCurve, point: StepTiming) -> float:
    """Returns the seconds that the curve predicts for the point."""
    return sum(getattr(curve, name) * x for name, x in zip(COLUMNS, point.features, strict=True))


def _non_negative(rows: NDArray[np.float64]) -> list[float]:
    """argmin |rows.c - 1| over c >= 0, by trying every set of positive coefficients: there are 31."""
    scale = np.where((size := np.abs(rows).max(axis=0)) > 0, size, 1.0)
    scaled, ones, count = rows / scale, np.ones(len(rows)), rows.shape[1]
    best, found = float(len(rows)), np.zeros(count)
    for used in range(1, count + 1):
        for chosen in combinations(range(count), used):
            part, *_ = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)
            left = float(((scaled[:, chosen] @ part - ones) ** 2).sum())
            if (part >= 0).all() and left < best - 1e-12:
                best, found = left, np.zeros(count)
                found[list(chosen)] = part
    return [float(c) for c in found / scale]
