"""95% confidence intervals of measured figures, by resampling. Torch-free.

Knows nothing of what the figures mean. The resampling is seeded, so that the same measurements give the same
interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESAMPLES = 2000  # bootstrap resamples
SEED = 0  # of the resamples, so that a report is the same each time
LOW, HIGH = 2.5, 97.5  # percentiles
# Of a standard normal: what lies within is 95%.
Z = 1.959964


def ratio_interval(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, float]:
    """Returns the 95% interval of sum(tops) / sum(bottoms), by a percentile bootstrap over the pairs."""
    top, bottom = np.asarray(tops, np.float64), np.asarray(bottoms, np.float64)
    return _percentiles(len(top), lambda draws: (draws @ top) / np.maximum(draws @ bottom, 1e-300))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95% interval of the mean of ``values``, by a percentile bootstrap."""
    return ratio_interval(values, [1.0] * len(values))


def share_interval(hits: int, of: int) -> tuple[float, float]:
    """Returns Wilson's 95% interval of the share hits / of, which is valid for small counts too; (0, 1) if ``of``
    is 0.
    """
    if not of:
        return 0.0, 1.0
    share, weight = hits / of, Z * Z / of
    middle = (share + weight / 2) / (1 + weight)
    reach = Z * np.sqrt(share * (1 - share) / of + weight / of / 4) / (1 + weight)
    return float(max(0.0, middle - reach)), float(min(1.0, middle + reach))


def _percentiles(count: int, figure: Callable[[Floats], Floats]) -> tuple[float, float]:
    draws = np.random.default_rng(SEED).multinomial(count, [1 / count] * count, RESAMPLES).astype(np.float64)
    low, high = np.percentile(figure(draws), [LOW, HIGH])
    return float(low), float(high)
