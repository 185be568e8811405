"""Interpolation in measured tables. Torch-free, pure.

Knows nothing of what was measured. A table is nested sorted axes with seconds at the leaves; rows may be missing:
each branch has its own points. It is linear between points, extrapolated along the last two beyond the end (never
below 0), and constant below the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Axis:
    """Interpolates over one coordinate; each of its sorted points leads to a number of seconds or to the next
    coordinate's Axis.

    ``rows`` are (key, seconds), with one coordinate per nesting in ``key``.
    """

    __slots__ = ("_next", "_points")

    def __init__(self, rows: Iterable[tuple[Sequence[float], float]]) -> None:
        groups: dict[float, list[tuple[Sequence[float], float]]] = {}
        for key, seconds in rows:
            groups.setdefault(key[0], []).append((key[1:], seconds))
        self._points = sorted(groups)
        self._next: list[Axis | float] = [_branch(groups[point]) for point in self._points]

    def at(self, *key: float) -> float:
        """Returns the interpolated seconds at ``key``, one coordinate per nesting."""
        x, rest = key[0], key[1:]
        points = self._points
        if len(points) == 1:
            return self._value(0, rest)
        i = bisect_left(points, x)
        if i < len(points) and points[i] == x:
            return self._value(i, rest)
        i = min(max(i, 1), len(points) - 1)
        low, high = self._value(i - 1, rest), self._value(i, rest)
        share = (x - points[i - 1]) / (points[i] - points[i - 1])
        if share < 0:
            return low  # below the least measured size a kernel costs what the least one does
        return max(0.0, low + share * (high - low))

    def _value(self, i: int, rest: tuple[float, ...]) -> float:
        found = self._next[i]
        return found if isinstance(found, float) else found.at(*rest)

    @property
    def points(self) -> list[float]:
        """Returns the measured points of this coordinate, sorted."""
        return self._points


def _branch(rows: list[tuple[Sequence[float], float]]) -> Axis | float:
    return Axis(rows) if rows[0][0] else float(sum(seconds for _, seconds in rows) / len(rows))
