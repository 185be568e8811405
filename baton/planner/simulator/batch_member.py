"""A request in the batch of a decode worker in compressed time. Knows nothing of seconds: a tick is a step."""

from __future__ import annotations

from baton.kv.pages.pool import PageLease
from baton.planner.simulator.flight import Flight


class BatchMember:
    """``reading``: prompt tokens left. It writes from tick ``start`` to ``due``; ``gone``: it left the batch."""

    __slots__ = ("age", "due", "flight", "gone", "lease", "reading", "start")

    def __init__(self, flight: Flight, lease: PageLease, age: int, reading: int) -> None:
        self.flight, self.lease, self.age, self.reading = flight, lease, age, reading
        self.due = self.start = 0
        self.gone = False

    @property
    def tokens(self) -> int:
        """Returns the tokens of prompt and answer that the flight knows of: what was written since ``start`` isn't
        in it.
        """
        return self.flight.prompt + self.flight.written

    def begin(self, tick: int) -> None:
        """Notes that the member writes a token a tick from now on."""
        self.start = tick
        self.due = tick + self.flight.outputs - self.flight.written

    def wrote(self, tick: int) -> None:
        """Tells the flight what was written until now."""
        self.flight.written += tick - self.start

    def seal(self) -> None:
        """Makes the prompt's full blocks findable."""
        self.lease.seal_run(0, self.flight.full_blocks)
