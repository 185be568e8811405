"""A request on its way through the simulated cluster. Knows nothing of how it is moved.

Where a decode worker dies, what is left of an answer is a flight of its own, whose ``origin`` is the first one.

Times are seconds of the simulated clock; -1 until they are known.
"""

from __future__ import annotations

import struct

from baton.planner.traces import TraceRequest


class Flight:
    """``full_blocks`` are the chained ids of the prompt's full blocks; ``written`` counts output tokens."""

    __slots__ = (
        "arrival", "cached", "decode", "epoch", "first_token", "full_blocks", "index", "last_token", "moves",
        "origin", "outputs", "placed", "preemptions", "prefill", "prompt", "refused", "unread", "way", "written",
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
        self.epoch = 0  # rises when its way is left: what was still to happen on it doesn't

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


def blocks_of(index: int, request: TraceRequest, trace_tokens: int, block_tokens: int) -> list[bytes]:
    """Ids of the full blocks of ``block_tokens``: of the trace where it has them, else the request's own."""
    full = request.input_length // block_tokens
    if not request.hash_ids:
        return [struct.pack("<BIq", 1, i, index) for i in range(full)]
    each = trace_tokens // block_tokens
    return [struct.pack("<BIq", 0, i % each, request.hash_ids[i // each]) for i in range(full)]
