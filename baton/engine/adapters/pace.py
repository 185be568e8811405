"""Paces a process that works beside an engine's steps: it works in short pieces, and rarely where steps want the
core.

Knows nothing of the work. A low priority alone doesn't suffice: a process that has begun keeps its core for a tick
of the kernel (up to 4 ms), and a thread of the step that wakes there meanwhile waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

PIECE_S = 0.0002  # CPU time between two pauses: one hundredth of a step of 20 ms
SHARE, MOST_SHARE = 0.01, 0.5  # of a core's time while others want the core: of small work, of the largest
LONGEST_S = 10.0  # that work is to take beside others: a larger share is taken of what would take longer
S_PER_BYTE, S_PER_TENSOR = 3e-9, 2e-5  # of CPU time, of reading, digesting and packing
SOME = 0.25  # of a piece's CPU time: who waits longer than that for a core shares it with others
_SCHEDSTAT = Path("/proc/self/schedstat")  # ns on a core, ns of waiting for one, number of turns

Seconds = Callable[[], float]
Pacing = Callable[[], None]  # to be called between short parts of some work


def no_pace() -> None:
    """Lets the work go on at once."""


def waited_s() -> float:
    """Returns how long this process's threads were ready to run and had no core, in seconds.

    Where the kernel doesn't count that, returns a clock: the process counts as waiting always.
    """
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return time.monotonic()


class Pace:
    """Makes its caller pause. It is called between parts of the work that take a fraction of PIECE_S each.

    The share of a core that the work takes follows from its CPU time: what was expected, or twice what it has taken
    so far if that is more.
    """

    def __init__(
        self,
        ran: Seconds = time.process_time,
        waited: Seconds = waited_s,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ran, self._waited, self._sleep = ran, waited, sleep
        self._expected = 0.0
        self._began = self._ran_before = ran()
        self._waited_before = waited()

    def expect(self, size: int, tensors: int) -> None:
        """Expects what comes to be the reading of ``tensors`` tensors of ``size`` bytes together."""
        self._expected = self._ran() - self._began + expected_s(size, tensors)

    @property
    def share(self) -> float:
        """Returns the share of a core's time that the work takes where others want the core."""
        return share_for(max(self._expected, 2.0 * (self._ran_before - self._began)))

    def __call__(self) -> None:
        """Sleeps if a piece of work is done; the pause is ``pause_s`` of the piece."""
        if (ran := self._ran() - self._ran_before) < PIECE_S:
            return
        waited = self._waited()
        self._sleep(pause_s(ran, waited - self._waited_before, self.share))
        self._ran_before, self._waited_before = self._ran(), waited


def expected_s(size: int, tensors: int) -> float:
    """Returns the seconds of CPU time that reading ``tensors`` tensors of ``size`` bytes together takes."""
    return size * S_PER_BYTE + tensors * S_PER_TENSOR


def share_for(seconds: float) -> float:
    """Returns the share of a core for work of ``seconds`` seconds of CPU time."""
    return min(MOST_SHARE, max(SHARE, seconds / LONGEST_S))


def pause_s(ran: float, waited: float, share: float = SHARE) -> float:
    """Returns the pause in seconds after ``ran`` seconds of work, for which the process waited ``waited`` seconds.

    It is as long as the work; or, where others wanted the core, so long that the work takes ``share`` of the time,
    in which it also waited.
    """
    return max(ran, ran / share - ran - waited) if waited > SOME * ran else ran
