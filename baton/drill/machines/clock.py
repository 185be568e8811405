"""The monotonic clocks of simulated machines, which may drift, and the event loop that keeps each process's time.

Knows nothing of wall clocks. What a process asks of the event loop (its time, timers, timeouts, sleeps) goes by the
clock of the machine that it runs on; the network, faults and the judge go by the true time.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

from baton.drill.loop import SeededLoop, seeded_loop

Ts = TypeVarTuple("Ts")
CLOCK: contextvars.ContextVar[MachineClock | None] = contextvars.ContextVar("clock", default=None)


class MachineClock:
    """The monotonic clock of one machine, in seconds: the true time, until it is made to ``drift``."""

    def __init__(self) -> None:
        self._true = seeded_loop().true_time
        self._rate, self._ahead = 1.0, 0.0  # it shows the true time times the first, and the second

    def now(self) -> float:
        """Returns what the clock shows."""
        return self._true() * self._rate + self._ahead

    def drift(self, rate: float) -> None:
        """Has the clock run ``rate`` times as fast from now on; it goes on from what it shows."""
        self._ahead, self._rate = self.now() - self._true() * rate, rate

    def true_time_of(self, shown: float) -> float:
        """Returns the true time at which the clock shows ``shown`` at its present rate."""
        return (shown - self._ahead) / self._rate

    def lasts(self, seconds: float) -> float:
        """Returns the true seconds in which the clock advances by ``seconds``."""
        return seconds / self._rate


class DriftingLoop(SeededLoop):
    """An event loop whose time and timers are those of the calling process's machine.

    A timer that was set before its clock's rate changed goes off when it would have without the change.
    """

    def time(self) -> float:
        """Returns what the calling process's monotonic clock shows; the true time outside of processes."""
        clock = CLOCK.get()
        return self._now if clock is None else clock.now()

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedules ``callback`` after ``delay`` seconds of the calling process's clock; returns its handle."""
        clock = CLOCK.get()
        after = delay if clock is None else clock.lasts(delay)
        return self.call_at_true(self._now + after, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedules ``callback`` for the time at which the calling process's clock shows ``when``."""
        clock = CLOCK.get()
        true = when if clock is None else clock.true_time_of(when)
        return self.call_at_true(true, callback, *args, context=context)
