"""Counts the rows that experts computed since an engine took its role. Torch-free.

Knows nothing of models or metrics: ranks count, and the counts at the beginning are subtracted.
"""

from __future__ import annotations

import msgspec

from baton.engine.abilities import Ranks
from baton.protos.measurements import ExpertLoad


class ExpertMeter:
    """Reads the expert row counts of ``ranks``, starting at 0 when it is made; ``ranks`` is None for a model that
    runs as one process.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._before = ranks.expert_rows() if ranks is not None else None

    def load(self) -> ExpertLoad | None:
        """Returns the rows that experts computed so far, by rank; None if experts aren't divided among ranks."""
        if self._ranks is None or (before := self._before) is None or (now := self._ranks.expert_rows()) is None:
            return None
        rows = _since(now.by_expert, before.by_expert)
        copies = msgspec.structs.replace(now.copies, moves=now.copies.moves - before.copies.moves)
        return ExpertLoad(_since(now.by_rank, before.by_rank), max(rows), len(rows), copies)


def _since(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(count - earlier for count, earlier in zip(now, before, strict=True))
