"""Bucketing of seconds, once for both the histograms of /metrics and the live figures.

Knows nothing of requests. A cell is an interval that no edge of either divides, so that one look-up gives the
bucket in both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from baton.cluster.metering.metrics import SECONDS
from baton.router.observe.live import Bins, bin_of, bin_start

Cells = dict[int, int]
LONGEST_S = 86400.0  # what is beyond it is counted as that long in the live figures
EDGES = sorted({*map(float, SECONDS), *(bin_start(at) for at in range(1, bin_of(LONGEST_S)))})
_WITHIN = [EDGES[0], *((a + b) / 2 for a, b in pairwise(EDGES)), EDGES[-1] * 1.01]
_BUCKETS = [bisect_left(SECONDS, seconds) for seconds in _WITHIN]
_BINS = [bin_of(seconds) for seconds in (EDGES[0] / 2, *_WITHIN[1:])]
_EDGES = np.array(EDGES)
MOST = 2048  # gaps that wait to be looked up, together


class Gaps:
    """Counts the gaps between tokens; ``drain`` returns what was counted since the last call."""

    __slots__ = ("_cells", "_each", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._cells: Counter[int] = Counter()
        self._each: list[float] = []
        self._tokens: list[int] = []
        self._seconds = 0.0

    def count(self, seconds: float, tokens: int) -> None:
        """Counts ``tokens`` that came together, ``seconds`` after the ones before: that many gaps of ``seconds`` /
        ``tokens``.
        """
        self._each.append(seconds / tokens)
        self._tokens.append(tokens)
        self._seconds += seconds
        if len(self._tokens) >= MOST:
            self._look_up()

    def drain(self, bins: Bins) -> tuple[dict[int, int], float]:
        """Returns the number of gaps by histogram bucket, and the sum of their seconds; adds the gaps to the live
        figures' ``bins``, too.
        """
        self._look_up()
        cells, seconds = self._cells, self._seconds
        self._cells, self._seconds = Counter(), 0.0
        return sort_into(cells, bins), seconds

    def _look_up(self) -> None:
        if self._tokens:
            self._cells.update(cells_of(self._each, self._tokens))
            self._each, self._tokens = [], []


def cells_of(values: Sequence[float], counts: Sequence[int] | None = None) -> Cells:
    """Returns the number of ``values``, in seconds, by cell; ``values[i]`` counts ``counts[i]`` times if given."""
    found = np.bincount(_EDGES.searchsorted(values), counts)
    (cells,) = found.nonzero()
    return dict(zip(cells.tolist(), map(int, found[cells].tolist()), strict=True))


def sort_into(cells: Cells, bins: Bins) -> dict[int, int]:
    """Returns the numbers of ``cells`` by histogram bucket; adds them to the live figures' ``bins``, too."""
    buckets: dict[int, int] = {}
    for cell, count in cells.items():
        bucket, at = _BUCKETS[cell], _BINS[cell]
        buckets[bucket] = buckets.get(bucket, 0) + count
        bins[at] = bins.get(at, 0) + count
    return buckets
