"""A request on its way through the simulated cluster. Knows nothing of how it is moved.

Where a decode worker dies, what is left of an answer is a flight of its own, whose ``origin`` is the first one.

Times are seconds of the simulated clock; -1 until they are known.
"""

from __future__ import annotations

from typing import Any

from baton.kv.pages.pool import PagePool
from baton.planner.traces.trace import TraceRequest
from baton.router.dispatch.fair_queue import Order, RequestLoad, work_of

BLOCK_BITS = 24  # of a block's place in a prompt
Blocks = list[Any]  # numbers where workers have hashes: a pool only asks whether two are equal


class Flight:
    """``full_blocks`` are the chained ids of the prompt's full blocks; ``written`` counts output tokens."""

    __slots__ = (
        "arrival", "cached", "decode", "epoch", "first_token", "full_blocks", "index", "last_token", "load",
        "moves", "order", "origin", "outputs", "placed", "preemptions", "prefill", "prompt", "refused", "seen",
        "unread", "way", "written",
    )  # fmt: skip
    pool = queue = ""  # in the router's queue: all flights are of one model, and wait as one class

    def __init__(self, index: int, request: TraceRequest, full_blocks: Blocks) -> None:
        self.index = index
        self.arrival = request.arrival
        self.prompt, self.outputs = request.input_length, request.output_length
        self.full_blocks = full_blocks
        self.load = RequestLoad(work=work_of(self.prompt, self.outputs))
        self.order: Order = (0.0, 0)
        self.written = self.cached = self.preemptions = self.unread = 0
        self.placed = self.first_token = self.last_token = -1.0
        self.prefill = self.decode = self.way = ""
        self.refused = False
        self.origin: Flight | None = None
        self.moves = 0  # how often a decode worker that had it died
        self.seen: dict[str, tuple[PagePool, int, int]] = {}  # by worker: its pool then, and blocks found in it
        self.epoch = 0  # rises when its way is left: what was still to happen on it doesn't

    @property
    def since(self) -> float:
        """Returns when it came to the router, in seconds of the simulated clock."""
        return self.arrival

    def held_in(self, name: str, pool: PagePool) -> int:
        """Returns leading blocks that are found in a worker's pool; looked for again when that has changed."""
        seen = self.seen.get(name)
        if seen is not None and seen[0] is pool and seen[1] == pool.version:
            return seen[2]
        held = pool.match(self.full_blocks)
        self.seen[name] = pool, pool.version, held
        return held

    def again(self, index: int, block_tokens: int) -> Flight:
        """Returns a flight of what is left: tokens that were written are part of its prompt."""
        prompt, outputs = self.prompt + self.written, self.outputs - self.written
        more = range(len(self.full_blocks), prompt // block_tokens)
        blocks = [*self.full_blocks, *(own_block(index, i) for i in more)]
        leg = Flight(index, TraceRequest(self.arrival, prompt, outputs), blocks)
        leg.origin, leg.first_token = self.origin or self, self.first_token
        leg.load, leg.order = self.load, self.order  # its place in the router's queue stays its own
        leg.origin.moves += 1
        return leg

    def landed(self) -> None:
        """Copies the times of a whole answer to its origin."""
        if self.origin is not None:
            self.origin.first_token, self.origin.last_token = self.first_token, self.last_token
            self.origin.written = self.origin.outputs
            self.origin.preemptions += self.preemptions


def own_block(index: int, place: int) -> int:
    """Returns the id of a block that only one flight has; none of ``BlockIds``, which aren't negative."""
    return -1 - (index << BLOCK_BITS | place)


class BlockIds:
    """Ids of full blocks of ``block_tokens`` tokens, in the order in which they are first seen.

    A prompt's follow one another, and so lie side by side in a pool's index: as random as hashes they took a third
    of a simulation. Equal ones are one object, which dicts find sooner.
    """

    def __init__(self, trace_tokens: int, block_tokens: int) -> None:
        self._block, self._each = block_tokens, trace_tokens // block_tokens
        self._known: dict[tuple[int, int], Blocks] = {}
        self._next = 0

    def of(self, request: TraceRequest) -> Blocks:
        """Returns the ids that the trace has for the prompt's blocks, else the request's own."""
        full = request.input_length // self._block
        if not request.hash_ids:
            return self._new(full)
        found: Blocks = []
        for hash_id in request.hash_ids:
            found += self._parts((request.adapter, hash_id))
        return found[:full]

    def _parts(self, block: tuple[int, int]) -> Blocks:
        """The ids of one of the trace's blocks, by adapter and id: what one adapter has computed is no other's."""
        parts = self._known.get(block)
        if parts is None:
            parts = self._known[block] = self._new(self._each)
        return parts

    def _new(self, count: int) -> Blocks:
        self._next += count
        return list(range(self._next - count, self._next))
