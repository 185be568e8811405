"""Counts the rows that experts computed since an engine took its role. Torch-free.

Knows nothing of models or metrics: ranks count, and the counts at the beginning are subtracted.
"""

from __future__ import annotations

from baton.engine.plan import Ranks
from baton.protos.measurements import ExpertLoad


class ExpertMeter:
    """Reads the expert row counts of ``ranks``, starting at 0 when it is made; ``ranks`` is None for a model that
    runs as one process.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._before = ranks.expert_rows() if ranks is not None else ()

    def load(self) -> ExpertLoad | None:
        """Returns the rows that experts computed so far, by rank; None if experts aren't divided among ranks."""
        if self._ranks is None or not self._before:
            return None
        now = self._ranks.expert_rows()
        rows = tuple(count - before for count, before in zip(now, self._before, strict=True))
        by_rank = tuple(sum(rows[begin:end]) for begin, end in self._ranks.dealt_experts)
        return ExpertLoad(by_rank, max(rows), len(rows))
