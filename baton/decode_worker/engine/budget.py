"""Limits the prompt tokens and answers of a step so that answers keep their pace. Torch-free.

Knows nothing of sequences or pages: it predicts a step's duration from a curve fitted to earlier steps. Without a
target, and until enough steps were seen, it limits nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.cost.curves import decode_seconds
from baton.cost.fit import StepFit
from baton.protos.measurements import StepCurve, StepSample
from baton.protos.nouns import BLOCK_TOKENS

REFIT_EVERY = 16  # steps between two fits, because a fit costs about a millisecond
# Where decoding alone takes as long as the target, a prompt still gets on: its chunk may add so much to the step.
LEAST_SHARE = 0.25


class StepBudget:
    """Limits steps so that ``target_s`` seconds lie between two tokens of an answer; 0 for no target."""

    def __init__(self, target_s: float = 0.0) -> None:
        self._target = target_s
        self._fit = StepFit()
        self._curve: StepCurve | None = None

    def observe(self, sample: StepSample) -> None:
        """Adds a step that was run to the data for the fit."""
        if not self._target:
            return
        self._fit.observe(sample)
        if self._fit.samples % REFIT_EVERY == 0:
            self._curve = self._fit.curve

    @property
    def limits(self) -> bool:
        """Returns whether there is a target, and enough steps were seen to keep it."""
        return self._curve is not None

    @property
    def limit_s(self) -> float:
        """Returns the most seconds that a step should take; 0 for no limit."""
        return self._target

    def chunk(self, most: int, start: int, sequences: int, context: int) -> int:
        """Returns how many prompt tokens a step may compute after ``start`` ones: at least a block, at most
        ``most``.

        ``sequences`` sequences with ``context`` tokens in total decode in the same step; if there are none, it is
        ``most``.
        """
        curve = self._curve
        if curve is None or not sequences:
            return most
        decode = decode_seconds(curve, sequences, context)
        fits = _tokens_in(curve, start, max(self._target - decode, LEAST_SHARE * decode))
        return min(most, max(BLOCK_TOKENS, fits // BLOCK_TOKENS * BLOCK_TOKENS))

    def batch(self, contexts: Sequence[int], most: int) -> int:
        """Returns how many of the answers with ``contexts`` tokens of context may advance in one step: at least
        1.
        """
        curve, context = self._curve, 0
        if curve is None:
            return most
        for count, tokens in enumerate(contexts[:most], 1):
            context += tokens
            if count > 1 and decode_seconds(curve, count, context) > self._target:
                return count - 1
        return most


def _tokens_in(curve: StepCurve, start: int, seconds: float) -> int:
    """Returns the most tokens t whose cost, t x token + t (start + t / 2) x pair, is within ``seconds``."""
    square, linear = curve.prefill_pair / 2, curve.prefill_token + curve.prefill_pair * start
    if square <= 0:
        return int(seconds / linear) if linear > 0 else 1 << 30
    return int((math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square))
