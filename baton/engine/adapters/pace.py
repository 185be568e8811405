"""Paces a process that works beside an engine's steps: it works in short pieces, and rarely where steps want the
core.

Knows nothing of the work. A low priority alone doesn't suffice: a process that has begun keeps its core for a tick
of the kernel (up to 4 ms), and a thread of the step that wakes there meanwhile waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

PIECE_S = 0.0005  # CPU time between two pauses: one hundredth of a step of 50 ms
SHARE, MOST_SHARE = 0.03, 0.5  # of a core's time while others want the core: of small work, of the largest
LONGEST_S = 10.0  # that work is to take beside others: a larger share is taken of what would take longer
SOME = 0.25  # of a piece's CPU time: who waits longer than that for a core shares it with others
_SCHEDSTAT = Path("/proc/self/schedstat")  # ns on a core, ns of waiting for one, number of turns

Seconds = Callable[[], float]


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

    ``share`` is of a core's time, and may be changed while it works.
    """

    def __init__(
        self,
        ran: Seconds = time.process_time,
        waited: Seconds = waited_s,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ran, self._waited, self._sleep = ran, waited, sleep
        self.share = SHARE
        self._ran_before, self._waited_before = ran(), waited()

    def __call__(self) -> None:
        """Sleeps if a piece of work is done; the pause is ``pause_s`` of the piece."""
        if (ran := self._ran() - self._ran_before) < PIECE_S:
            return
        waited = self._waited()
        self._sleep(pause_s(ran, waited - self._waited_before, self.share))
        self._ran_before, self._waited_before = self._ran(), waited


def share_for(seconds: float) -> float:
    """Returns the share of a core for work of ``seconds`` seconds of CPU time."""
    return min(MOST_SHARE, max(SHARE, seconds / LONGEST_S))


def pause_s(ran: float, waited: float, share: float = SHARE) -> float:
    """Returns the pause in seconds after ``ran`` seconds of work, for which the process waited ``waited`` seconds.

    It is as long as the work; or, where others wanted the core, so long that the work takes ``share`` of the time,
    in which it also waited.
    """
    return max(ran, ran / share - ran - waited) if waited > SOME * ran else ran
