"""The monotonic clocks of simulated machines, which may drift, and the event loop that keeps each process's time.

Knows nothing of wall clocks. What a process asks of the event loop (its time, timers, timeouts, sleeps) goes by the
clock of the machine that it runs on; the network, faults and the judge go by the true time.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

from baton.drill.loop import SeededLoop, SeededTimer, seeded_loop

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
        """Has the clock run ``rate`` times as fast from now on; it goes on from what it shows, and its timers go
        off when it shows their time.
        """
        before = self._rate, self._ahead
        self._ahead, self._rate = self.now() - self._true() * rate, rate
        if isinstance(loop := seeded_loop(), DriftingLoop):
            loop.move(self, lambda true: self.true_time_of(true * before[0] + before[1]))

    def true_time_of(self, shown: float) -> float:
        """Returns the true time at which the clock shows ``shown`` at its present rate."""
        return (shown - self._ahead) / self._rate

    def lasts(self, seconds: float) -> float:
        """Returns the true seconds in which the clock advances by ``seconds``."""
        return seconds / self._rate


class MachineTimer(SeededTimer):
    """A timer that goes off when the clock of its machine shows a time."""

    __slots__ = ("clock",)
    clock: MachineClock


class DriftingLoop(SeededLoop):
    """An event loop whose time and timers are those of the calling process's machine."""

    def time(self) -> float:
        """Returns what the calling process's monotonic clock shows; the true time outside of processes."""
        clock = CLOCK.get()
        return self._now if clock is None else clock.now()

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedules ``callback`` after ``delay`` seconds of the calling process's clock; returns its handle."""
        clock = CLOCK.get()
        if clock is None:
            return self.call_at_true(self._now + delay, callback, *args, context=context)
        return self._timer(clock, self._now + clock.lasts(delay), callback, args, context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedules ``callback`` for the time at which the calling process's clock shows ``when``."""
        clock = CLOCK.get()
        if clock is None:
            return self.call_at_true(when, callback, *args, context=context)
        return self._timer(clock, clock.true_time_of(when), callback, args, context)

    def move(self, clock: MachineClock, moved: Callable[[float], float]) -> None:
        """Has the timers that go by ``clock`` go off at other true times, which ``moved`` gives, but not before
        now.
        """
        for _, _, timer in self._timers:
            if isinstance(timer, MachineTimer) and timer.clock is clock:
                timer._when = max(self._now, moved(timer.when()))
        self._timers[:] = [(timer.when(), number, timer) for _, number, timer in self._timers]
        heapq.heapify(self._timers)

    def _timer(
        self,
        clock: MachineClock,
        true: float,
        callback: Callable[[*Ts], object],
        args: tuple[*Ts],
        context: Context | None,
    ) -> MachineTimer:
        timer = MachineTimer(true, callback, args, self, context)
        timer.clock, timer._scheduled = clock, True
        heapq.heappush(self._timers, (true, next(self._timer_numbers), timer))
        return timer
