"""How often a choice was tried and where not to try it again. Knows nothing of connections, streams or messages."""

from __future__ import annotations

from collections.abc import Mapping

from baton.protos.nouns import WorkerInfo


class RetryState:
    """Remembers a choice's attempts for dispatch; ``begin`` starts the next one.

    ``failures`` are workers that failed it, ``moves`` workers that it left without their fault, ``suspected``
    workers that fell silent over it, ``misses`` those that had lost its adapter.
    ``hedged``: one slow prefill was given up already.
    ``absent_since``: since when no decode worker could be reached, in seconds of the router's clock.
    """

    __slots__ = (
        "_asked",
        "_left",
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
        self.admitted = self.fed = self.hedged = False
        self.absent_since: float | None = None

    @property
    def attempts(self) -> int:
        """Returns how many attempts there were, the present one included."""
        return self.failures + self.moves + 1

    def placed(self, incarnations: Mapping[str, str]) -> None:
        """Notes which incarnation of each worker it is placed on, by worker id."""
        self._asked.update(incarnations)

    def leave(self, worker_id: str) -> None:
        """Notes that the incarnation it was placed on last is to be avoided; a successor isn't."""
        self._left.add((worker_id, self._asked.get(worker_id, "")))

    def avoids(self, info: WorkerInfo) -> bool:
        """Returns whether this incarnation of the worker failed it."""
        return (info.worker_id, info.incarnation) in self._left

    def begin(self) -> None:
        """Starts an attempt: its decode worker has neither admitted it nor given it a token."""
        self.admitted = self.fed = False
