"""Describes how a process ended: by its exit status, by a signal, or because memory ran out.

Knows nothing of workers.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NamedTuple

EVENTS = Path("/sys/fs/cgroup/memory.events")
RANK_LOST, MOST_RANKS = 192, 64  # exit status of an engine without its rank 0, and how many ranks have one


class Ending(NamedTuple):
    """Describes how a process ended: ``cause`` is "exit", "signal", "oom" or "rank"; ``detail`` is a text for
    people.
    """

    cause: str
    detail: str


class OomKills:
    """Notices whether the kernel has killed processes of this control group for lack of memory since
    construction.
    """

    def __init__(self, events: Path = EVENTS) -> None:
        self._events = events
        self._before = self._kills()

    def was_killed(self) -> bool:
        """Returns whether there was such a kill; False if it can't be read."""
        return self._kills() > self._before

    def _kills(self) -> int:
        try:
            lines = self._events.read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def rank_status(rank: int) -> int:
    """Returns the exit status by which an engine reports that its ``rank`` is gone or stuck."""
    return RANK_LOST + rank


def ending_of(code: int, memory: OomKills) -> Ending:
    """Returns how a child ended, by its return code as subprocess gives it (negative: a signal)."""
    if RANK_LOST <= code < RANK_LOST + MOST_RANKS:
        return Ending("rank", f"rank {code - RANK_LOST} of its engine is gone or stuck")
    if code >= 0:
        return Ending("exit", f"exit status {code}")
    name = _signal_name(-code)
    if code == -signal.SIGKILL and memory.was_killed():
        return Ending("oom", f"{name}: the kernel was out of memory for its control group")
    return Ending("signal", name)


def _signal_name(number: int) -> str:
    """Returns a signal's name; Python has none for most of the real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
