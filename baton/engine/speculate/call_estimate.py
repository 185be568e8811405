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

SHARE = 0.004  # of the steps' time that may go into drafts which bring nothing
UNFELT = 0.01  # share of a step's time that a call may take without being felt
SELDOM = 500  # steps between calls that are felt: few beside the hundredth that a 99th percentile sees
SOONER = 8  # divides SELDOM while what is known of drafts is more good than bad
AT_ONCE = 8  # sequences asked by a call that is felt: the first one takes most of the time, with cold caches
FIRST_CALLS = 3  # of a worker, which are made as if they took FIRST_S, so that drafts which pay are found soon
MOST_SAVED = 1.0  # calls that the time saved up may pay at once
NEW = 0.1  # weight of the last measurement
MOST_OFF = 4.0  # a call that takes so many times as long as expected, or more (the core was lent), counts as that
MOST_REST = 256  # steps in a row in which no sequence is considered, because no call would pay
FIRST_S, LEAST_S = 50e-6, 1e-6  # seconds of a call until they are known, and that it takes at least
HOPE = 1.0  # accepted tokens expected of a call before any was made, and if the client predicts the answer


class CallEstimate:
    """Estimates how many accepted tokens a call for drafts brings per sequence, and what it costs in seconds."""

    def __init__(self) -> None:
        self.call_s = FIRST_S  # mean seconds of a call
        self._calls, self._first_s = 0, 0.0  # first calls, and their seconds
        self._saved_s = 0.0
        self._brings: dict[int, float] = {}  # accepted tokens per call, faded
        self._usual = HOPE  # of all sequences: where a new one begins
        self._turn = 0
        self._is_felt = False
        self._rest_s = 0.0  # a step's share of time, where nobody's drafts pay

    def chosen(
        self,
        texts: Sequence[T],
        step_s: float,
        steps: int = 1,
        hopeful: Sequence[T] | None = None,
        promising: bool = False,
    ) -> list[T]:
        """Returns the sequences of ``texts`` to ask for drafts.

        A step of all ``texts`` takes ``step_s`` seconds and brings each one token; ``steps`` were run since the
        last call. Of ``hopeful`` ones (None: of all), those are asked whose drafts are expected to be worth a call.
        ``promising`` says that drafts brought more than they cost so far, if only by luck.
        """
        token_s = step_s / max(1, len(texts))
        hopeful = texts if hopeful is None else hopeful
        asked = [text for text in hopeful if self._expected(text) * token_s > self.call_s]
        share_s = SHARE * step_s
        self._is_felt = is_felt = self._calls >= FIRST_CALLS and self.call_s >= UNFELT * step_s
        if is_felt:
            share_s = min(share_s, self.call_s * (SOONER if promising else 1) / SELDOM)
        self._saved_s = min(self._saved_s + steps * share_s, max(MOST_SAVED * self.call_s, share_s))
        count = min(int(self._saved_s / self.call_s), len(texts) - len(asked))
        self._rest_s = 0.0 if asked else share_s
        if count <= 0:
            return asked
        paying = {text.seq for text in asked}
        others = [text for text in texts if text.seq not in paying]
        self._saved_s -= count * self.call_s
        if is_felt and AT_ONCE * self.call_s < step_s:
            count = min(AT_ONCE, len(others))
        self._turn += count
        begin = (self._turn - count) % len(others)
        return asked + (others[begin:] + others[:begin])[:count]

    @property
    def is_felt(self) -> bool:
        """Returns whether a call made in the present step is felt, so that calls are few."""
        return self._is_felt

    def rest(self) -> int:
        """Returns how many steps of the same texts may pass before any could be chosen, because no drafts pay; 0 if
        some do.
        """
        if not self._rest_s:
            return 0
        return min(MOST_REST, max(0, math.ceil((self.call_s - self._saved_s) / self._rest_s) - 1))

    def took(self, calls: int, seconds: float) -> None:
        """Records that ``calls`` calls took ``seconds`` together."""
        if self._calls < FIRST_CALLS:
            self._calls, self._first_s = self._calls + calls, self._first_s + seconds
            if self._calls >= FIRST_CALLS:
                self.call_s = max(LEAST_S, self._first_s / self._calls)
            return
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
