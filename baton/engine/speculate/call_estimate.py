"""Chooses the sequences that are asked for drafts in a step: all whose drafts pay, and as many others as cost next
to nothing.

Knows nothing of batches, pages or models, and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from baton.engine.speculate.draft import SequenceView

T = TypeVar("T", bound=SequenceView)

SHARE = 0.002  # of the steps' time that may go into drafts which bring nothing
MOST_SAVED = 4.0  # calls that the time saved up may pay at once
NEW = 0.1  # weight of the last measurement
MOST_OFF = 4.0  # a call that takes so many times as long as expected, or more (the core was lent), counts as that
MOST_REST = 64  # steps in a row in which no sequence is considered, because no call would pay
HOPE = 1.0  # accepted tokens expected of a call before any was made, and if the client predicts the answer


class CallEstimate:
    """Estimates how many accepted tokens a call for drafts brings per sequence, and what it costs in seconds."""

    def __init__(self) -> None:
        self.call_s = 5e-6  # mean seconds of a call
        self._saved_s = 0.0
        self._brings: dict[int, float] = {}  # accepted tokens per call, faded
        self._usual = HOPE  # of all sequences: where a new one begins
        self._turn = 0
        self._rest_s = 0.0  # a step's share of time, where nobody's drafts pay

    def chosen(self, texts: Sequence[T], step_s: float, steps: int = 1) -> list[T]:
        """Returns the sequences of ``texts`` to ask for drafts.

        A step of all ``texts`` takes ``step_s`` seconds and brings each one token; ``steps`` were run since the
        last call.
        """
        token_s = step_s / max(1, len(texts))
        asked = [text for text in texts if self._expected(text) * token_s > self.call_s]
        self._saved_s = min(self._saved_s + steps * SHARE * step_s, max(MOST_SAVED * self.call_s, SHARE * step_s))
        count = min(int(self._saved_s / self.call_s), len(texts) - len(asked))
        self._rest_s = 0.0 if asked else SHARE * step_s
        if count <= 0:
            return asked
        paying = {text.seq for text in asked}
        others = [text for text in texts if text.seq not in paying]
        self._saved_s -= count * self.call_s
        self._turn += count
        begin = (self._turn - count) % len(others)
        return asked + (others[begin:] + others[:begin])[:count]

    def rest(self) -> int:
        """Returns how many steps of the same texts may pass before any could be chosen, because no drafts pay; 0 if
        some do.
        """
        if not self._rest_s:
            return 0
        return min(MOST_REST, max(0, math.ceil((self.call_s - self._saved_s) / self._rest_s) - 1))

    def took(self, calls: int, seconds: float) -> None:
        """Records that ``calls`` calls took ``seconds`` together."""
        self.call_s += NEW * (min(seconds / calls, MOST_OFF * self.call_s) - self.call_s)

    def brought(self, seq: int, tokens: int) -> None:
        """Records that a call for sequence ``seq`` brought ``tokens`` accepted tokens."""
        before = self._brings.get(seq, self._usual)
        self._brings[seq] = before + NEW * (tokens - before)
        self._usual += NEW * (tokens - self._usual)

    def _expected(self, text: SequenceView) -> float:
        found = self._brings.get(text.seq)
        if found is None:
            return HOPE if text.request.prediction else self._usual
        return found

    def end(self, seq: int) -> None:
        """Forgets the estimate for the sequence ``seq``."""
        self._brings.pop(seq, None)
