"""A request in the batch of a decode worker in compressed time.

Knows nothing of seconds: a tick is a step.
"""

from __future__ import annotations

from baton.kv.pages.pool import PageLease
from baton.planner.simulator.flight import Blocks, Flight, own_block


class BatchMember:
    """Holds one sequence of the batch.

    ``prompt_left``: prompt tokens left to compute. ``sealed``: its blocks that the prefix cache has. It generates
    from tick ``start`` to ``due``; ``gone``: it has left the batch. ``age`` numbers members in order of joining.
    """

    __slots__ = ("age", "due", "flight", "gone", "lease", "prompt_left", "sealed", "start")

    def __init__(self, flight: Flight, lease: PageLease, age: int, prompt_left: int) -> None:
        self.flight, self.lease, self.age, self.prompt_left = flight, lease, age, prompt_left
        self.due = self.start = 0
        self.sealed = lease.held
        self.gone = False

    @property
    def tokens(self) -> int:
        """Returns the tokens of prompt and answer that the flight knows of, without those generated since
        ``start``.
        """
        return self.flight.prompt + self.flight.written

    def begin(self, tick: int) -> None:
        """Notes that the member generates one token per tick from ``tick`` on."""
        self.start = tick
        self.due = tick + self.flight.outputs - self.flight.written

    def wrote(self, tick: int) -> None:
        """Adds to the flight's count the tokens generated from ``start`` to ``tick``."""
        self.flight.written += tick - self.start

    def seal(self, computed: int, block_tokens: int) -> None:
        """Enters the full blocks of the first ``computed`` tokens in the prefix cache, the answer's own among
        them.
        """
        full = computed // block_tokens
        if full > self.sealed:
            self.lease.seal_run(self.sealed, self.blocks(self.sealed, full))
            self.sealed = full

    def blocks(self, first: int, end: int) -> Blocks:
        """Returns the ids of full blocks ``first`` to ``end`` of the sequence, the answer's own among them."""
        prompt = self.flight.full_blocks
        more = range(max(first, len(prompt)), end)
        return [*prompt[first:end], *(own_block(self.flight.index, place) for place in more)]
