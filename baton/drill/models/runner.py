"""The paced runner of the drill's model, which the simulated models with other pages begin from.

Knows nothing of what their pages are like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.drill.language.oracle import EOS, MOST_TOKENS, ROW_BYTES, VOCABULARY
from baton.engine.backends.paced.adapters import PacedAdapters
from baton.engine.backends.paced.runner import PacedRunner
from baton.protos.measurements import StepSample
from baton.protos.nouns import BLOCK_TOKENS


class Timing(NamedTuple):
    """Says how time passes for a runner: the seconds that a step takes, what lets them pass, and the clock."""

    step_seconds: Callable[[StepSample], float]
    sleep: Callable[[float], None]
    clock: Callable[[], float]


class SimulatedRunner(PacedRunner):
    """The paced runner with the vocabulary, rows and longest context of the drill's model."""

    def __init__(self, name: str, timing: Timing, adapters: PacedAdapters | None) -> None:
        super().__init__(name, ROW_BYTES, VOCABULARY, MOST_TOKENS, *timing, (EOS,), adapters=adapters)


def places(table: Sequence[int], begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the pages of block table ``table``, and the rows in them, of positions ``begin`` … ``end`` - 1."""
    at, first = np.arange(begin, end), begin // BLOCK_TOKENS
    pages = np.asarray(table[first : -(-end // BLOCK_TOKENS)], np.int64)
    return pages[at // BLOCK_TOKENS - first], at % BLOCK_TOKENS
