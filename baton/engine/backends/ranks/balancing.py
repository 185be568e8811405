"""Follows what goes to each expert and says when a layer's copies should change; what they become: placement.py.

Knows nothing of processes, weights or clocks. Loads are looked at after a number of rows. Then one layer per step
is judged, so that no step waits for more than one layer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

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
        self._looked = deque[tuple[int, list[int]]]()  # layers to be judged, and their loads
        self._computed, self._moves, self._copies = 0, 0, 0
        self._busiest = [0.0, 0.0, 0.0]  # rows of layers' busiest ranks without copies and with them, and of all
        self._imbalance = 0.0, 0.0

    @property
    def copies(self) -> ExpertCopies:
        """Returns what the placements are like, as of the last look."""
        return ExpertCopies(self._copies, self._moves, *self._imbalance)

    def due(self, rows: int) -> ExpertsNote | None:
        """Returns the placement that one layer should have before a step of ``rows`` rows; None for most steps."""
        if not self._looked and self._computed >= self._look_rows:
            self._look()
        self._computed += rows
        return self._judged(*self._looked.popleft()) if self._looked else None

    def placed(self, note: ExpertsNote) -> None:
        """Reports that all ranks have placed a layer so."""
        new = changed(self._placed[note.layer], note.placement)
        self._copies += note.placement.copies() - self._placed[note.layer].copies()
        self._placed[note.layer] = note.placement
        self._moves += len(new)
        where = ", ".join(f"expert {expert} to rank {rank}" for expert, rank in new) or "rows dealt anew"
        log.info("layer of experts %d: %s", note.layer, where)

    def _look(self) -> None:
        now = self._rows()
        self._looked.extend(enumerate((now - self._before).tolist()))
        self._before, self._computed, self._busiest = now, 0, [0.0, 0.0, 0.0]

    def _judged(self, layer: int, rows: list[int]) -> ExpertsNote | None:
        """Returns the placement of a layer for these ``rows`` of its experts; None if that isn't worth it."""
        placed = self._placed[layer]
        most = max(placed.loads(rows))
        for at, more in enumerate((max(self._home.loads(rows)), most, sum(rows))):
            self._busiest[at] += more
        home, with_copies, total = self._busiest
        if not self._looked and total:
            self._imbalance = home * len(placed.held) / total, with_copies * len(placed.held) / total
        wanted = place(rows, self._spare, placed)
        return ExpertsNote(layer, wanted) if max(wanted.loads(rows)) <= WORTH * most and most else None
