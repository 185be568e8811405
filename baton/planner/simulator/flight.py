"""A request on its way through the simulated cluster.

Knows nothing of how it is moved. If a decode worker dies, the rest of an answer is a flight of its own, whose
``origin`` is the first one. Times are seconds of the simulated clock; -1 until they are known.
"""

from __future__ import annotations

from typing import Any

from baton.kv.pages.pool import PagePool
from baton.planner.traces.trace import TraceRequest
from baton.router.dispatch.fair_queue import Order, RequestLoad, work_of

BLOCK_BITS = 24  # of a block's place in a prompt
AnyBlock = Any  # a number where workers have hashes: a pool only asks whether two are equal
Blocks = list[AnyBlock]


class Flight:
    """Holds a request's state and times.

    ``full_blocks`` are the chained ids of the prompt's full blocks; ``prompt``, ``outputs``, ``written`` (so far),
    ``cached`` and ``uncached`` (uncached) count tokens.
    """

    __slots__ = (
        "arrival", "cached", "decode", "epoch", "first_token", "full_blocks", "index", "last_token", "load",
        "moves", "order", "origin", "outputs", "placed", "prefill", "prompt", "refused", "seen",
        "uncached", "way", "written",
    )  # fmt: skip
    pool = queue = ""  # in the router's queue: all flights are of one model, and wait as one class

    def __init__(self, index: int, request: TraceRequest, full_blocks: Blocks) -> None:
        self.index = index
        self.arrival = request.arrival
        self.prompt, self.outputs = request.input_length, request.output_length
        self.full_blocks = full_blocks
        self.load = RequestLoad(work=work_of(self.prompt, self.outputs))
        self.order: Order = (0.0, 0)
        self.written = self.cached = self.uncached = 0
        self.placed = self.first_token = self.last_token = -1.0
        self.prefill = self.decode = self.way = ""
        self.refused = False
        self.origin: Flight | None = None
        self.moves = 0  # how often a decode worker that had it died
        self.seen: dict[str, tuple[PagePool, int, int]] = {}  # by worker: its pool then, and blocks found in it
        self.epoch = 0  # rises when its way is left: what was still to happen on it doesn't

    @property
    def since(self) -> float:
        """Returns when it arrived at the router, in seconds of the simulated clock."""
        return self.arrival

    def held_in(self, name: str, pool: PagePool) -> int:
        """Returns the number of leading blocks that are in worker ``name``'s pool, cached until the pool
        changes.
        """
        seen = self.seen.get(name)
        if seen is not None and seen[0] is pool and seen[1] == pool.version:
            return seen[2]
        held = pool.match(self.full_blocks)
        self.seen[name] = pool, pool.version, held
        return held

    def again(self, index: int, block_tokens: int) -> Flight:
        """Returns a new flight for the rest of the answer: tokens already generated become part of its prompt."""
        prompt, outputs = self.prompt + self.written, self.outputs - self.written
        more = range(len(self.full_blocks), prompt // block_tokens)
        blocks = [*self.full_blocks, *(own_block(index, i) for i in more)]
        leg = Flight(index, TraceRequest(self.arrival, prompt, outputs), blocks)
        leg.origin, leg.first_token = self.origin or self, self.first_token
        leg.load, leg.order = self.load, self.order  # its place in the router's queue stays its own
        leg.origin.moves += 1
        return leg

    def ended(self) -> Flight:
        """Returns this flight without what only a running simulation needs: blocks, and pools that it looked in."""
        self.full_blocks = []
        self.seen.clear()
        return self

    def landed(self) -> None:
        """Copies the times of a complete answer to its origin, if this flight continued one."""
        if self.origin is not None:
            self.origin.first_token, self.origin.last_token = self.first_token, self.last_token
            self.origin.written = self.origin.outputs


def own_block(index: int, place: int) -> int:
    """Returns a negative id, unique to block ``place`` of flight ``index``; trace blocks have ids of 0 and
    above.
    """
    return -1 - (index << BLOCK_BITS | place)


class BlockIds:
    """Numbers the full blocks of prompts, ``block_tokens`` tokens each, in the order in which they are first seen.

    ``trace_tokens`` are those of one of the trace's hash ids. Consecutive numbers make a pool's index faster than
    random hashes would (a third of a simulation), and equal ids are one object.
    """

    def __init__(self, trace_tokens: int, block_tokens: int) -> None:
        self._block, self._each = block_tokens, trace_tokens // block_tokens
        self._known: dict[tuple[int, int], Blocks] = {}
        self._next = 0

    def of(self, request: TraceRequest) -> Blocks:
        """Returns the ids of the prompt's full blocks, by the trace's hash ids; new ones if it has none."""
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
