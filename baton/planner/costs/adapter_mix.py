"""The seconds that LoRA adapters add to a simulated step, by their measured cost and their shares of the traffic.

Knows nothing of workers or of traces. Which sequences share a step isn't followed: each is on adapter i with the
probability of i's share of tokens. Routing that gathers an adapter's requests on one worker leaves fewer different
adapters in a step than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.protos.measurements import AdapterCurve

MOST_SEQUENCES = 1024  # of a step; with more of them hardly another adapter comes in


class AdapterMix(msgspec.Struct, frozen=True):
    """Holds the seconds that a row adds to a step on average, those of a different adapter, and how many different
    adapters to expect.

    ``distinct[n]`` is the expected number of different adapters among n sequences.
    """

    row: float
    adapter: float
    distinct: tuple[float, ...]

    def seconds(self, rows: float, sequences: int) -> float:
        """Returns the seconds that adapters add to a step of ``rows`` rows of ``sequences`` sequences."""
        return self.row * rows + self.adapter * self.distinct[min(sequences, len(self.distinct) - 1)]


def mix_of(curve: AdapterCurve, shares: Sequence[float]) -> AdapterMix:
    """Returns the mix of adapters that cost as ``curve`` says and have ``shares`` (0 to 1) of all tokens."""
    found = np.asarray(shares, np.float64)
    row = float(found.sum()) * curve.row * curve.rank
    return AdapterMix(row, curve.adapter * curve.rank, tuple(_distinct(found)))


def _distinct(shares: NDArray[np.float64]) -> Iterator[float]:
    """Yields how many different adapters to expect among 0, 1, … MOST_SEQUENCES sequences."""
    absent = np.ones(len(shares))  # chance of each that no sequence is on it
    for _ in range(MOST_SEQUENCES + 1):
        yield float((1.0 - absent).sum())
        absent *= 1.0 - shares
