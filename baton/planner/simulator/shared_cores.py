"""Workers on the same cores, in modelled time: a step takes longer while others compute. Torch-free.

Knows nothing of requests, and of a step only how long it takes alone. A prefill step under way is slowed down and
let go as others begin and end. A decode step is short: it is told who reads when it begins, and until when as that
looks then; who joins in the middle of it is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

At = Callable[[float, Callable[[], None]], None]


class CoreSharing(msgspec.Struct, frozen=True):
    """Says how many times as long a step of each role takes while one other worker computes; each more adds as
    much.
    """

    prefill: float
    decode: float


class PrefillStep(msgspec.Struct):
    """A prefill step: seconds alone that are left since ``since``, and how many times as long they take now."""

    left: float
    since: float
    end: Callable[[], None]
    pace: float = 1.0
    version: int = 0

    @property
    def ends(self) -> float:
        """Returns when the step ends if nothing changes."""
        return self.since + self.left * self.pace


class SharedCores:
    """``at`` is the clock: calls back at a time."""

    def __init__(self, sharing: CoreSharing, at: At) -> None:
        self._sharing, self._at = sharing, at
        self._reading: dict[str, PrefillStep] = {}
        self._writing: set[str] = set()

    def read(self, name: str, now: float, seconds: float, end: Callable[[], None]) -> None:
        """Begins a step of worker ``name`` that takes so many seconds alone; ``end`` is called when it is over."""
        self._reading[name] = PrefillStep(seconds, now, end)
        self._changed(now)

    def writes(self, name: str, now: float, busy: bool) -> None:
        """Notes whether a decode worker has something to do."""
        if busy is not (name in self._writing):
            (self._writing.add if busy else self._writing.discard)(name)
            self._changed(now)

    def stretched(self, name: str, begin: float, seconds: float) -> float:
        """Returns how long a decode step takes that begins now and takes ``seconds`` alone."""
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
        """Drops the step of a worker that died: it never ends."""
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
