"""The state of one request in a decode engine, from its admission to its end. Torch-free.

Knows nothing of pages, messages or of who asks: the loop says what happened and when.
"""

from __future__ import annotations

from baton.decode_worker.engine.job import DecodeJob
from baton.decode_worker.engine.leases import HandoffLease
from baton.protos.nouns import Station, TokenRun


class RequestState:
    """A request's job, its handoff's lease (None if the prompt is computed locally), and its times in monotonic
    seconds.
    """

    def __init__(self, job: DecodeJob, receive: HandoffLease | None, now: float):
        self.job = job
        self.receive = receive
        self.arrived = now
        self.first_at: float | None = None
        self.cached_tokens = 0

    @property
    def awaited(self) -> bool:
        """Returns whether the request's prompt is still being received from a prefill worker."""
        return self.receive is not None and not self.receive.committed

    def first_stations(self, now: float) -> tuple[Station, ...]:
        """Returns the duration of a local prefill; () after a handoff, because the prefill worker reports that."""
        return (Station("prefill", now - self.arrived),) if self.receive is None else ()

    def last_stations(self, run: TokenRun, now: float) -> tuple[Station, ...]:
        """Returns the duration of decoding, from the first token on; () unless ``run`` ends the answer."""
        if not run.finish_reason or self.first_at is None:
            return ()
        return (Station("decode", now - self.first_at),)
