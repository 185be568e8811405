"""A request on its way through the simulated cluster. Knows nothing of how it is moved.

Times are seconds of the simulated clock; -1 until they are known.
"""

from __future__ import annotations

import struct

from baton.planner.traces import TraceRequest


class Flight:
    """``full_blocks`` are the chained ids of the prompt's full blocks; ``written`` counts output tokens."""

    __slots__ = (
        "arrival", "cached", "decode", "first_token", "full_blocks", "index", "last_token", "outputs",
        "placed", "preemptions", "prefill", "prompt", "refused", "unread", "way", "written",
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


def blocks_of(index: int, request: TraceRequest, trace_tokens: int, block_tokens: int) -> list[bytes]:
    """Ids of the full blocks of ``block_tokens``: of the trace where it has them, else the request's own."""
    full = request.input_length // block_tokens
    if not request.hash_ids:
        return [struct.pack("<BIq", 1, i, index) for i in range(full)]
    each = trace_tokens // block_tokens
    return [struct.pack("<BIq", 0, i % each, request.hash_ids[i // each]) for i in range(full)]
