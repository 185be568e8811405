"""Decides when a decode engine that shares its cores with a prefill engine takes its next step. Torch-free.

Knows nothing of sequences or cores. A step reads all weights, for one answer as for eight. While prompts wait for
the same cores, steps that follow one another at once hold one or two answers each and cost the prompts as much as
full ones; held apart, they carry all answers that began meanwhile, so that prompts are computed sooner and more
tokens are generated per second.
"""

from __future__ import annotations

from collections.abc import Callable

LOOK_S = 0.005  # seconds between two looks at whether prompts are still read, far below what anybody sees


class StepPace:
    """Keeps ``pace_s`` seconds (0: none) between the beginnings of two steps while ``prompts_beside()`` is true.

    ``clock`` gives monotonic seconds.
    """

    def __init__(self, pace_s: float, prompts_beside: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._pace_s, self._prompts_beside, self._clock = pace_s, prompts_beside, clock
        self._begun_at = float("-inf")
        self._held = False

    def begin(self) -> None:
        """Registers that a step begins now."""
        self._begun_at, self._held = self._clock(), False

    def holds(self) -> bool:
        """Returns whether the next step still has to wait."""
        self._held = self._left_s > 0 and self._prompts_beside()
        return self._held

    @property
    def patience(self) -> float:
        """Returns the seconds after which ``holds`` should be called again; infinite if no step is held back."""
        left = self._left_s
        return min(left, LOOK_S) if self._held and left > 0 else float("inf")

    @property
    def _left_s(self) -> float:
        return self._begun_at + self._pace_s - self._clock()
