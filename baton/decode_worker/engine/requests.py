"""Holds what a decode engine knows of one request from its admission to its end. Torch-free.

Knows nothing of pages, messages or of who asks: the loop says what happened and when.
"""

from __future__ import annotations

from baton.decode_worker.engine.job import DecodeJob
from baton.decode_worker.engine.leases import HandoffLease
from baton.protos.nouns import Station, TokenRun


class RequestState:
    """Holds what is known of one request: its job, its handoff's lease (None on the local way) and its times."""

    def __init__(self, job: DecodeJob, receive: HandoffLease | None, now: float):
        self.job = job
        self.receive = receive
        self.arrived = now
        self.first_at: float | None = None
        self.cached_tokens = 0

    @property
    def awaited(self) -> bool:
        """Tells whether its prompt is still on the way here."""
        return self.receive is not None and not self.receive.committed

    def first_stations(self, now: float) -> tuple[Station, ...]:
        """Returns what its first token took, where this worker read the prompt; else the prefill worker tells."""
        return (Station("prefill", now - self.arrived),) if self.receive is None else ()

    def last_stations(self, run: TokenRun, now: float) -> tuple[Station, ...]:
        """Returns what its answer took from the first token on, once ``run`` ends it."""
        if not run.finish_reason or self.first_at is None:
            return ()
        return (Station("decode", now - self.first_at),)
