"""Checks when a decode engine that shares its cores takes its steps: not too soon beside prompts, and not late.

Knows nothing of how a step is held back; it computes by itself how long one may be.
"""

from __future__ import annotations

import math

from baton.decode_worker.engine.loop import DecodeLoop
from baton.decode_worker.engine.pace import LOOK_S, OF_CHUNK
from baton.drill.checks.watch import Violated
from baton.drill.machines.cores import CoreSeat

ROUNDED_S = 1e-6
WAKES_S = LOOK_S + 0.002  # seconds after which an engine whose step is held back looks again


class PaceWitness:
    """Watches engine ``name``, which has ``seat`` and keeps ``pace_s`` seconds between steps beside prompts."""

    def __init__(self, name: str, seat: CoreSeat, pace_s: float, violated: Violated) -> None:
        self._name, self._seat, self._pace_s, self._violated = name, seat, pace_s, violated
        self._begun_at = self._looked_at = -math.inf
        self._least_s = math.inf  # that a step has been held back since the last one, as of any look
        self._held = False

    def begins(self, loop: DecodeLoop, now: float) -> None:
        """Takes the beginning of a step of ``loop`` at ``now``, by the engine's clock."""
        waited = now - self._begun_at
        if loop.scheduler.only_decodes and waited < min(self._least_s, self._most_s()) - ROUNDED_S:
            self._violated(f"{self._name}: a step begins {waited:.4f} s after another, beside prompts")
        self._begun_at, self._least_s = now, math.inf

    def turned(self, loop: DecodeLoop, now: float, stood: bool) -> None:
        """Takes the end of a turn at ``now``; ``stood`` says that the engine had to stand still before it."""
        if self._held and not stood and now - self._looked_at > WAKES_S:
            self._violated(
                f"{self._name}: a step that is held back is looked at after {now - self._looked_at:.4f} s"
            )
        most_s, waited = self._most_s(), now - self._begun_at
        self._held, self._looked_at = loop.pace.patience < math.inf, now
        self._least_s = min(self._least_s, most_s)
        if self._held and waited > most_s + ROUNDED_S:
            self._violated(f"{self._name}: a step is held back for {waited:.4f} s, and may be for {most_s:.4f} s")

    def _most_s(self) -> float:
        return min(self._pace_s, OF_CHUNK * self._seat.prompts_beside())
