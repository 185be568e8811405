"""Decides when a decode engine that shares its cores with a prefill engine takes its next step. Torch-free.

Knows nothing of sequences or cores. A step reads all weights, for one answer as for eight. While prompts wait for
the same cores, steps that follow one another at once hold one or two answers each and cost the prompts as much as
full ones; held apart, they carry all answers that began meanwhile, so that prompts are computed sooner and more
tokens are generated per second.
"""

from __future__ import annotations

from collections.abc import Callable

LOOK_S = 0.005  # seconds between two looks at whether prompts are still read, far below what anybody sees
# Share of the time of a prompt's chunk that lies between two steps at most. One worker that does both puts a whole
# chunk between them: less than half of that is what a worker for each is for.
OF_CHUNK = 0.4


class StepPace:
    """Keeps ``pace_s`` seconds (0: none), or ``OF_CHUNK`` of a chunk's time if that is shorter, between the
    beginnings of two steps while prompts are read beside.

    ``prompts_beside()`` returns the seconds that the slowest reader takes for a chunk, 0 if nobody reads; ``clock``
    gives monotonic seconds.
    """

    def __init__(self, pace_s: float, prompts_beside: Callable[[], float], clock: Callable[[], float]) -> None:
        self._most_s = self._pace_s = pace_s
        self._prompts_beside, self._clock = prompts_beside, clock
        self._begun_at = float("-inf")
        self._held = False

    def begin(self) -> None:
        """Registers that a step begins now."""
        self._begun_at, self._held, self._pace_s = self._clock(), False, self._most_s

    def holds(self) -> bool:
        """Returns whether the next step still has to wait."""
        self._held = self._left_s > 0 and self._has_to_wait()
        return self._held

    def _has_to_wait(self) -> bool:
        chunk_s = self._prompts_beside()
        self._pace_s = min(self._most_s, OF_CHUNK * chunk_s)
        return self._left_s > 0

    @property
    def patience(self) -> float:
        """Returns the seconds after which ``holds`` should be called again; infinite if no step is held back."""
        left = self._left_s
        return min(left, LOOK_S) if self._held and left > 0 else float("inf")

    @property
    def _left_s(self) -> float:
        return self._begun_at + self._pace_s - self._clock()
