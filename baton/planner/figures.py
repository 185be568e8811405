"""Mean, median and percentiles of values, and relative errors between two sets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Distribution(msgspec.Struct, frozen=True):
    """Summarises a set of values."""

    mean: float
    median: float
    p90: float
    p99: float


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the percentile ``share`` (0 to 1) of sorted values, interpolated linearly; 0 for no values."""
    if not ordered:
        return 0.0
    at = (len(ordered) - 1) * share
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def distribution(values: Sequence[float]) -> Distribution:
    """Returns mean, median, 90th and 99th percentile of ``values``; zeros for none."""
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered) if ordered else 0.0
    return Distribution(mean, percentile(ordered, 0.5), percentile(ordered, 0.9), percentile(ordered, 0.99))


def relative_errors(observed: Distribution, simulated: Distribution) -> dict[str, float | None]:
    """Returns (simulated - observed) / observed for each figure; None where 0 was observed but not simulated."""
    errors: dict[str, float | None] = {}
    for name in Distribution.__struct_fields__:
        seen, said = getattr(observed, name), getattr(simulated, name)
        errors[name] = (said - seen) / seen if seen else (0.0 if said == seen else None)
    return errors
