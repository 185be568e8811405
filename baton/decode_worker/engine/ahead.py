"""Has drafters read prompts whose KV is still received or computed, so that an answer's first step can have drafts.

Knows nothing of leases, pages or how drafts are made: it is told which sequences wait and how long steps take. If
there is nothing else to do it reads on; beside steps it takes at most the share SHARE of their time.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.sequence import SequenceState
from baton.engine.speculate.drafter import Drafter

SHARE = 0.004  # of the steps' time that reading may take beside them
FIRST_S = 200e-6  # what one call is thought to take before one was made


class PromptReader:
    """Feeds waiting sequences to ``drafter``, which is None if nothing is drafted. ``clock`` gives seconds."""

    def __init__(self, drafter: Drafter | None, clock: Callable[[], float]) -> None:
        self._drafter, self._clock = drafter, clock
        self._waiting: dict[int, SequenceState] = {}
        self._saved_s, self._call_s = 0.0, FIRST_S

    def begin(self, sequence: SequenceState) -> None:
        """Adds a sequence whose prompt is being received or computed, unless it can't have drafts."""
        if self._drafter is not None and sequence.draft_room:
            self._waiting[sequence.seq] = sequence

    def end(self, seq: int) -> None:
        """Removes the sequence ``seq``, because its prompt is there or its request has ended."""
        self._waiting.pop(seq, None)

    def turn(self, step_s: float) -> bool:
        """Has the drafter read a part of the first waiting sequence, if time allows; returns False if there was
        nothing to do.

        ``step_s`` is the duration of the step that was just run in seconds, 0 if there was none.
        """
        if not self._waiting or self._drafter is None:
            return False
        self._saved_s = min(self._saved_s + SHARE * step_s, self._call_s)
        if step_s and self._saved_s < self._call_s:
            return False
        began, (seq, sequence) = self._clock(), next(iter(self._waiting.items()))
        count = self._drafter.read_prompt(sequence, idle=not step_s)
        if step_s:
            self._saved_s, self._call_s = 0.0, max(self._clock() - began, 1e-6)
        if not count:
            del self._waiting[seq]  # all of it was read, or all that can be
            if step_s:
                self._waiting[seq] = sequence  # last: beside steps less can be read than without any
        return bool(count) or bool(self._waiting)
