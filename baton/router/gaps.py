"""Seconds counted once, for the histograms of /metrics and for the live figures.

Knows nothing of requests. A cell is what no edge of either divides, so that one look-up says where some seconds
belong in both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import pairwise

from baton.cluster.metrics import SECONDS
from baton.router.live import Bins, bin_of, bin_start

Cells = dict[int, int]
LONGEST_S = 86400.0  # what is beyond it is counted as that long in the live figures
EDGES = sorted({*map(float, SECONDS), *(bin_start(at) for at in range(1, bin_of(LONGEST_S)))})
_WITHIN = [EDGES[0], *((a + b) / 2 for a, b in pairwise(EDGES)), EDGES[-1] * 1.01]
_BUCKETS = [bisect_left(SECONDS, seconds) for seconds in _WITHIN]
_BINS = [bin_of(seconds) for seconds in (EDGES[0] / 2, *_WITHIN[1:])]
_cell = partial(bisect_left, EDGES)


class Gaps:
    """``count`` each gap between tokens; ``drain`` hands over what was counted since the last time."""

    __slots__ = ("_cells", "_seconds")

    def __init__(self) -> None:
        self._cells: Cells = {}
        self._seconds = 0.0

    def count(self, seconds: float, tokens: int) -> None:
        """``tokens`` came together, ``seconds`` after those before them."""
        cells, cell = self._cells, bisect_left(EDGES, seconds / tokens)
        cells[cell] = cells.get(cell, 0) + tokens
        self._seconds += seconds

    def drain(self, bins: Bins) -> tuple[dict[int, int], float]:
        """Gaps by the histogram's bucket, and their seconds together; they are added to ``bins``, too."""
        cells, seconds = self._cells, self._seconds
        self._cells, self._seconds = {}, 0.0
        return sort_into(cells, bins), seconds


def cells_of(values: Iterable[float]) -> Cells:
    """How many of ``values``, in seconds, are in each cell."""
    return Counter(map(_cell, values))


def sort_into(cells: Cells, bins: Bins) -> dict[int, int]:
    """How many are in each of the histogram's buckets; they are added to ``bins``, too."""
    buckets: dict[int, int] = {}
    for cell, count in cells.items():
        bucket, at = _BUCKETS[cell], _BINS[cell]
        buckets[bucket] = buckets.get(bucket, 0) + count
        bins[at] = bins.get(at, 0) + count
    return buckets
