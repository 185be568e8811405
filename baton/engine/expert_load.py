"""Says how rows were shared among experts since an engine took its role. Torch-free.

Knows nothing of models or metrics: ranks count, and the counts of before are taken off.
"""

from __future__ import annotations

from baton.engine.plan import Ranks
from baton.protos.nouns import ExpertLoad


class ExpertMeter:
    """Reads the counts of ``ranks``, from now on; None where nobody counts."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._before = ranks.expert_rows() if ranks is not None else ()

    def load(self) -> ExpertLoad | None:
        """Returns the rows so far by rank; None where no experts are dealt among ranks."""
        if self._ranks is None or not self._before:
            return None
        now = self._ranks.expert_rows()
        rows = tuple(count - before for count, before in zip(now, self._before, strict=True))
        by_rank = tuple(sum(rows[begin:end]) for begin, end in self._ranks.dealt_experts)
        return ExpertLoad(by_rank, max(rows), len(rows))
