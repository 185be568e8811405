"""Mean, median and percentiles, and how far two sets of them lie apart. Pure.

Knows nothing of what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Figures(msgspec.Struct, frozen=True):
    """Summarises a set of values."""

    mean: float
    median: float
    p90: float
    p99: float


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns a percentile of sorted values, linear between ranks; 0 for none."""
    if not ordered:
        return 0.0
    at = (len(ordered) - 1) * share
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def figures(values: Sequence[float]) -> Figures:
    """Returns mean and percentiles of any values; zeros for none."""
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered) if ordered else 0.0
    return Figures(mean, percentile(ordered, 0.5), percentile(ordered, 0.9), percentile(ordered, 0.99))


def relative_errors(observed: Figures, simulated: Figures) -> dict[str, float | None]:
    """Returns (simulated - observed) / observed by figure; None where only 0 was observed, not simulated."""
    errors: dict[str, float | None] = {}
    for name in Figures.__struct_fields__:
        seen, said = getattr(observed, name), getattr(simulated, name)
        errors[name] = (said - seen) / seen if seen else (0.0 if said == seen else None)
    return errors
