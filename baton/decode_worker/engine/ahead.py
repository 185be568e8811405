"""Lets speculators read prompts whose KV is still on its way, so that the first step of an answer can have drafts.

Knows nothing of leases, pages or how drafts are made: it is told which sequences wait and how long steps take.
Where nothing else is to do it reads on; beside steps it takes no more than a share of their time.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.sequence import SequenceState
from baton.engine.speculate.drafter import Drafter

SHARE = 0.004  # of the steps' time that reading may take beside them
FIRST_S = 200e-6  # what one call is thought to take before one was made


class ReadAhead:
    """Reads for ``drafter``, None where nothing is drafted. ``clock`` gives seconds."""

    def __init__(self, drafter: Drafter | None, clock: Callable[[], float]) -> None:
        self._drafter, self._clock = drafter, clock
        self._waiting: dict[int, SequenceState] = {}
        self._saved_s, self._call_s = 0.0, FIRST_S

    def begin(self, sequence: SequenceState) -> None:
        """Begins to read a sequence whose prompt is on its way."""
        if self._drafter is not None and sequence.draft_room:
            self._waiting[sequence.seq] = sequence

    def end(self, seq: int) -> None:
        """Reads no more of a sequence: its prompt is here, or nobody wants it."""
        self._waiting.pop(seq, None)

    def turn(self, step_s: float) -> bool:
        """Reads some more, of the sequence that came first; returns whether it did.

        ``step_s`` is what the step took that was just run, 0 where none was.
        """
        if not self._waiting or self._drafter is None:
            return False
        self._saved_s = min(self._saved_s + SHARE * step_s, self._call_s)
        if step_s and self._saved_s < self._call_s:
            return False
        began, (seq, sequence) = self._clock(), next(iter(self._waiting.items()))
        count = self._drafter.read_ahead(sequence, idle=not step_s)
        if step_s:
            self._saved_s, self._call_s = 0.0, max(self._clock() - began, 1e-6)
        if not count and not step_s:
            del self._waiting[seq]  # all of it was read, or all that can be
        return bool(count) or bool(self._waiting)
