"""Follows what goes to each expert and says when a layer's copies should change; what they become: placement.py.

Knows nothing of processes, weights or clocks. Loads are looked at after a number of rows, and layers change one per
step, so that no step waits for more than one layer's copies.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from baton.engine.backends.ranks.notes import ExpertsNote
from baton.engine.backends.ranks.placement import Placement, changed, place
from baton.protos.measurements import ExpertCopies

log = logging.getLogger("baton.engine")

LOOK_ROWS = 4096  # token rows between two looks
WORTH = 0.9  # a layer changes if its busiest rank then has at most this part of its rows
Rows = NDArray[np.int64]  # (layers, experts): rows that went to each expert


class ExpertBalancer:
    """Places the experts of each layer among ``ranks`` ranks with ``spare`` places each.

    ``rows`` returns what went to every expert so far. It is asked once ``look_rows`` rows have been computed.
    """

    def __init__(self, rows: Callable[[], Rows], ranks: int, spare: int, look_rows: int = LOOK_ROWS) -> None:
        self._rows, self._spare, self._look_rows = rows, spare, look_rows
        self._before = rows()
        layers, experts = self._before.shape
        self._home = Placement.at_home(experts, ranks, spare)
        self._placed = [self._home] * layers
        self._due = deque[ExpertsNote]()
        self._computed, self._moves = 0, 0
        self._imbalance = 0.0, 0.0

    @property
    def copies(self) -> ExpertCopies:
        """Returns what the placements are like, as of the last look."""
        return ExpertCopies(sum(placed.copies() for placed in self._placed), self._moves, *self._imbalance)

    def due(self, rows: int) -> ExpertsNote | None:
        """Returns the placement that one layer should have before a step of ``rows`` rows; None for most steps."""
        if not self._due and self._computed >= self._look_rows:
            self._look()
        self._computed += rows
        return self._due.popleft() if self._due else None

    def placed(self, note: ExpertsNote) -> None:
        """Reports that all ranks have placed a layer so."""
        new = changed(self._placed[note.layer], note.placement)
        self._placed[note.layer] = note.placement
        self._moves += len(new)
        where = ", ".join(f"expert {expert} to rank {rank}" for expert, rank in new) or "rows dealt anew"
        log.info("layer of experts %d: %s", note.layer, where)

    def _look(self) -> None:
        now = self._rows()
        rows = (now - self._before).tolist()
        self._before, self._computed = now, 0
        self._imbalance = _imbalance(rows, [self._home] * len(rows)), _imbalance(rows, self._placed)
        for layer, (loads, placed) in enumerate(zip(rows, self._placed, strict=True)):
            wanted = place(loads, self._spare, placed)
            if max(wanted.loads(loads)) <= WORTH * max(placed.loads(loads)):
                self._due.append(ExpertsNote(layer, wanted))


def _imbalance(rows: Iterable[list[int]], placed: Iterable[Placement]) -> float:
    """Returns the busiest rank's rows over the mean of ranks, summed over layers; 0 where there are none."""
    loads = [placement.loads(of_layer) for of_layer, placement in zip(rows, placed, strict=True)]
    total = sum(map(sum, loads))
    return sum(map(max, loads)) * len(loads[0]) / total if total else 0.0
