"""Workers that share CPU cores, in simulated time: a step takes longer while others compute. Torch-free.

Knows nothing of requests, and of a step only its duration alone. A prefill step in progress slows down and speeds
up as others begin and end. A decode step is short: its duration is fixed when it begins, by the prefill steps then
in progress.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

At = Callable[[float, Callable[[], None]], None]


class CoreSharing(msgspec.Struct, frozen=True):
    """Says how many times as long a step of each role takes while one other worker computes; each further worker
    adds the same.
    """

    prefill: float
    decode: float


class PrefillStep(msgspec.Struct):
    """Holds a prefill step: ``left`` seconds (if alone) remain since ``since``, and take ``pace`` times as long
    now.
    """

    left: float
    since: float
    end: Callable[[], None]
    pace: float = 1.0
    version: int = 0  # rises with each change of ``pace``, which voids the end that was scheduled

    @property
    def ends(self) -> float:
        """Returns the simulated time at which the step ends if nothing changes."""
        return self.since + self.left * self.pace


class SharedCores:
    """Slows down steps of workers that share cores; ``at(when, act)`` schedules a callback."""

    def __init__(self, sharing: CoreSharing, at: At) -> None:
        self._sharing, self._at = sharing, at
        self._reading: dict[str, PrefillStep] = {}
        self._writing: set[str] = set()

    def read(self, name: str, now: float, seconds: float, end: Callable[[], None]) -> None:
        """Begins a prefill step of worker ``name`` that takes ``seconds`` alone; ``end`` is called when it is
        over.
        """
        self._reading[name] = PrefillStep(seconds, now, end)
        self._changed(now)

    def writes(self, name: str, now: float, busy: bool) -> None:
        """Notes whether decode worker ``name`` computes from ``now`` on."""
        if busy is not (name in self._writing):
            (self._writing.add if busy else self._writing.discard)(name)
            self._changed(now)

    def stretched(self, name: str, begin: float, seconds: float) -> float:
        """Returns the seconds of a decode step that begins at ``begin`` and takes ``seconds`` alone."""
        others, at, left = len(self._writing - {name}), begin, seconds
        ends = sorted(r.ends for r in self._reading.values() if r.ends > begin)
        for done, until in enumerate(ends):
            pace = self._pace(self._sharing.decode, others + len(ends) - done)
            if left * pace <= until - at:
                return at + left * pace - begin
            left -= (until - at) / pace
            at = until
        return at + left * self._pace(self._sharing.decode, others) - begin

    def stop(self, name: str, now: float) -> None:
        """Drops the step of worker ``name``, which died: its end is never called."""
        self._writing.discard(name)
        self._reading.pop(name, None)
        self._changed(now)

    @staticmethod
    def _pace(slow: float, others: int) -> float:
        return 1.0 + others * (slow - 1.0)

    def _changed(self, now: float) -> None:
        pace = self._pace(self._sharing.prefill, len(self._reading) + len(self._writing) - 1)
        for name, step in self._reading.items():
            step.left = max(0.0, step.left - (now - step.since) / step.pace)
            step.since, step.pace, step.version = now, pace, step.version + 1
            self._at(step.ends, self._ending(name, step, step.version))

    def _ending(self, name: str, step: PrefillStep, version: int) -> Callable[[], None]:
        def end() -> None:
            if step.version == version and self._reading.get(name) is step:
                del self._reading[name]
                self._changed(step.ends)
                step.end()

        return end
