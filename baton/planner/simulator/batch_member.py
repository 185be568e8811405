"""A request in the batch of a decode worker in compressed time.

Knows nothing of seconds: a tick is a step.
"""

from __future__ import annotations

from baton.kv.pages.pool import PageLease
from baton.planner.simulator.flight import Blocks, Flight, own_block


class BatchMember:
    """Holds one sequence of the batch.

    ``prompt_left``: prompt tokens left to compute. It generates from tick ``start`` to ``due``; ``gone``: it has
    left the batch. ``age`` numbers members in order of joining.
    """

    __slots__ = ("age", "due", "flight", "gone", "lease", "prompt_left", "start")

    def __init__(self, flight: Flight, lease: PageLease, age: int, prompt_left: int) -> None:
        self.flight, self.lease, self.age, self.prompt_left = flight, lease, age, prompt_left
        self.due = self.start = 0
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

    def seal(self) -> None:
        """Enters the prompt's full blocks in the prefix cache."""
        self.lease.seal_run(0, self.flight.full_blocks)

    def blocks(self, tokens: int, block_tokens: int) -> Blocks:
        """Returns the ids of the full blocks of the first ``tokens`` tokens, the answer's own among them."""
        prompt = self.flight.full_blocks
        more = range(len(prompt), tokens // block_tokens)
        return [*prompt[: tokens // block_tokens], *(own_block(self.flight.index, place) for place in more)]
