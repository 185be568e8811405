"""Seconds between tokens of one choice, counted once: for the histogram of /metrics and for the live figures.

Knows nothing of requests. A cell is what no edge of either divides, so that one look-up says where a gap belongs in
both; its answer's gaps are merged into both when it ends, and now and then before.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from baton.cluster.metrics import SECONDS
from baton.router.live import Bins, bin_of, bin_start

LONGEST_S = 3600.0  # gaps beyond it are counted as that long in the live figures
EDGES = sorted({*map(float, SECONDS), *(bin_start(at) for at in range(1, bin_of(LONGEST_S)))})
_WITHIN = [EDGES[0], *((a + b) / 2 for a, b in pairwise(EDGES)), EDGES[-1] * 1.01]
_BUCKETS = [bisect_left(SECONDS, seconds) for seconds in _WITHIN]
_BINS = [bin_of(seconds) for seconds in (EDGES[0] / 2, *_WITHIN[1:])]


class Gaps:
    """``count`` each gap; ``drain`` hands over what was counted since the last time."""

    __slots__ = ("_cells", "_seconds")

    def __init__(self) -> None:
        self._cells: dict[int, int] = {}
        self._seconds = 0.0

    def count(self, seconds: float, tokens: int) -> None:
        """``tokens`` came together, ``seconds`` after those before them."""
        cells, cell = self._cells, bisect_left(EDGES, seconds / tokens)
        cells[cell] = cells.get(cell, 0) + tokens
        self._seconds += seconds

    def drain(self, bins: Bins) -> tuple[dict[int, int], float]:
        """Gaps by the histogram's bucket, and their seconds together; they are added to ``bins``, too."""
        cells, seconds, buckets = self._cells, self._seconds, dict[int, int]()
        self._cells, self._seconds = {}, 0.0
        for cell, tokens in cells.items():
            bucket, at = _BUCKETS[cell], _BINS[cell]
            buckets[bucket] = buckets.get(bucket, 0) + tokens
            bins[at] = bins.get(at, 0) + tokens
        return buckets, seconds
