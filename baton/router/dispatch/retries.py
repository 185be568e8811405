"""How often a choice was tried and where not to try it again. Knows nothing of connections, streams or messages."""

from __future__ import annotations


class RetryState:
    """Remembers a choice's attempts for dispatch; ``begin`` starts the next one.

    ``failures`` are workers that failed it, ``moves`` workers that it left without their fault, ``suspected``
    workers that fell silent over it, ``misses`` those that had lost its adapter. ``avoid`` holds their ids.
    ``hedged``: one slow prefill was given up already.
    ``absent_since``: since when no decode worker could be reached, in seconds of the router's clock.
    """

    __slots__ = ("absent_since", "admitted", "avoid", "failures", "fed", "hedged", "misses", "moves", "suspected")

    def __init__(self) -> None:
        self.failures = self.moves = self.suspected = self.misses = 0
        self.avoid: set[str] = set()
        self.admitted = self.fed = self.hedged = False
        self.absent_since: float | None = None

    @property
    def attempts(self) -> int:
        """Returns how many attempts there were, the present one included."""
        return self.failures + self.moves + 1

    def begin(self) -> None:
        """Starts an attempt: its decode worker has neither admitted it nor given it a token."""
        self.admitted = self.fed = False
