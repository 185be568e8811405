"""A choice's count of attempts, and the workers to avoid.

Knows nothing of connections, streams or messages. Others read its attributes; only its methods set them.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.protos.nouns import WorkerInfo

PAUSE_S = (0.1, 1.0)  # seconds before a worker that failed a choice gets it again: at first, at most


class RetryState:
    """Remembers a choice's attempts; ``begin`` starts the next one.

    ``failures`` counts workers that failed it, ``moves`` those that it left without their fault, ``suspected``
    those whose engine stalled on it, ``misses`` those that had evicted its adapter. ``admitted``, ``fed``: the
    attempt's decode worker granted a lease, gave a token. ``hedged``: one slow prefill was abandoned already.
    ``absent_since``: the router's clock when no decode worker was left, else None.
    """

    __slots__ = (
        "_asked",
        "_left",
        "_pause_s",
        "absent_since",
        "admitted",
        "failures",
        "fed",
        "hedged",
        "misses",
        "moves",
        "suspected",
    )

    def __init__(self) -> None:
        self.failures = self.moves = self.suspected = self.misses = 0
        self._asked: dict[str, str] = {}  # incarnation by worker id, of those that it was placed on
        self._left: set[tuple[str, str]] = set()
        self._pause_s = 0.0
        self.admitted = self.fed = self.hedged = False
        self.absent_since: float | None = None

    @property
    def attempts(self) -> int:
        """Returns the number of attempts, the present one included."""
        return self.failures + self.moves + 1

    def placed(self, incarnations: Mapping[str, str]) -> None:
        """Notes the incarnation of each worker that the choice is placed on, by worker id."""
        self._asked.update(incarnations)

    def leave(self, worker_id: str) -> None:
        """Notes that the incarnation of the worker that the choice was placed on last is to be avoided; a later
        incarnation isn't.
        """
        self._left.add((worker_id, self._asked.get(worker_id, "")))

    def fail(self) -> None:
        """Counts a failure of a worker, after which the choice is to pause if nobody else could take it."""
        first, longest = PAUSE_S
        self._pause_s = min(longest, first * 2.0**self.failures)
        self.failures += 1

    def take_pause(self) -> float:
        """Returns the seconds for which the choice is to pause after its last failure; 0 if it was asked before."""
        pause, self._pause_s = self._pause_s, 0.0
        return pause

    @property
    def any_avoided(self) -> bool:
        """Returns whether the choice is to avoid any worker at all."""
        return bool(self._left)

    def avoids(self, info: WorkerInfo) -> bool:
        """Returns whether the choice is to avoid this incarnation of the worker."""
        return (info.worker_id, info.incarnation) in self._left

    def begin(self) -> None:
        """Resets ``admitted`` and ``fed`` for a new attempt."""
        self.admitted = self.fed = False

    def admit(self) -> None:
        """Notes that the attempt's decode worker granted a lease."""
        self.admitted = True

    def feed(self) -> None:
        """Notes that the attempt's decode worker gave a token."""
        self.fed = True

    def move(self) -> None:
        """Counts a worker that the choice leaves without the worker's fault."""
        self.moves += 1

    def miss(self) -> None:
        """Counts a worker that had evicted the choice's adapter."""
        self.misses += 1

    def suspect(self) -> None:
        """Counts a worker whose engine stalled on the choice."""
        self.suspected += 1

    def hedge(self) -> None:
        """Notes that a slow prefill was abandoned, which is done once."""
        self.hedged = True

    def absent_for(self, now: float) -> float:
        """Returns the seconds of the router's clock for which no decode worker has been left; 0 at the first call
        after ``present``.
        """
        if self.absent_since is None:
            self.absent_since = now
        return now - self.absent_since

    def present(self) -> None:
        """Notes that there is a decode worker."""
        self.absent_since = None
