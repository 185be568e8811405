"""A request on its way through the simulated cluster. Knows nothing of how it is moved.

Where a decode worker dies, what is left of an answer is a flight of its own, whose ``origin`` is the first one.

Times are seconds of the simulated clock; -1 until they are known.
"""

from __future__ import annotations

import struct

from baton.kv.pool import PagePool
from baton.planner.traces import TraceRequest


class Flight:
    """``full_blocks`` are the chained ids of the prompt's full blocks; ``written`` counts output tokens."""

    __slots__ = (
        "arrival", "cached", "decode", "epoch", "first_token", "full_blocks", "index", "last_token", "moves",
        "origin", "outputs", "placed", "preemptions", "prefill", "prompt", "refused", "seen", "unread",
        "way", "written",
    )  # fmt: skip

    def __init__(self, index: int, request: TraceRequest, full_blocks: list[bytes]) -> None:
        self.index = index
        self.arrival = request.arrival
        self.prompt, self.outputs = request.input_length, request.output_length
        self.full_blocks = full_blocks
        self.written = self.cached = self.preemptions = self.unread = 0
        self.placed = self.first_token = self.last_token = -1.0
        self.prefill = self.decode = self.way = ""
        self.refused = False
        self.origin: Flight | None = None
        self.moves = 0  # how often a decode worker that had it died
        self.seen: dict[str, tuple[PagePool, int, int]] = {}  # by worker: its pool then, and blocks found in it
        self.epoch = 0  # rises when its way is left: what was still to happen on it doesn't

    def held_in(self, name: str, pool: PagePool) -> int:
        """Leading blocks that are found in a worker's pool; looked for again when that has changed."""
        seen = self.seen.get(name)
        if seen is not None and seen[0] is pool and seen[1] == pool.version:
            return seen[2]
        held = pool.match(self.full_blocks)
        self.seen[name] = pool, pool.version, held
        return held

    def again(self, index: int, block_tokens: int) -> Flight:
        """What is left: tokens that were written are part of the prompt now."""
        prompt, outputs = self.prompt + self.written, self.outputs - self.written
        more = range(len(self.full_blocks), prompt // block_tokens)
        blocks = [*self.full_blocks, *(struct.pack("<BIq", 3, i, index) for i in more)]
        leg = Flight(index, TraceRequest(self.arrival, prompt, outputs), blocks)
        leg.origin, leg.first_token = self.origin or self, self.first_token
        leg.origin.moves += 1
        return leg

    def landed(self) -> None:
        """The answer is whole: its origin has its times."""
        if self.origin is not None:
            self.origin.first_token, self.origin.last_token = self.first_token, self.last_token
            self.origin.written = self.origin.outputs
            self.origin.preemptions += self.preemptions


class BlockIds:
    """Ids of full blocks of ``block_tokens`` tokens. Equal ones are one object: dicts find those much sooner."""

    def __init__(self, trace_tokens: int, block_tokens: int) -> None:
        self._block, self._each = block_tokens, trace_tokens // block_tokens
        self._known: dict[int, list[bytes]] = {}

    def of(self, index: int, request: TraceRequest) -> list[bytes]:
        """The trace's where it has them, else the request's own."""
        full = request.input_length // self._block
        if not request.hash_ids:
            return [struct.pack("<BIq", 1, i, index) for i in range(full)]
        found: list[bytes] = []
        for hash_id in request.hash_ids:
            found += self._parts(hash_id)
        return found[:full]

    def _parts(self, hash_id: int) -> list[bytes]:
        """The ids of one of the trace's blocks."""
        parts = self._known.get(hash_id)
        if parts is None:
            parts = self._known[hash_id] = [struct.pack("<BIq", 0, i, hash_id) for i in range(self._each)]
        return parts
