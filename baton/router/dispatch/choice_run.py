"""One choice of a request in flight: its place in the queue, progress, retries and decision record, across
attempts.

Knows nothing of connections or policies; the runner moves it from station to station.
"""

from __future__ import annotations

import asyncio

from baton.protos.errors import BatonError
from baton.protos.nouns import Station
from baton.protos.v1 import worker_pb2 as w
from baton.router.dispatch.admission import Ticket
from baton.router.dispatch.messages import Attempt
from baton.router.dispatch.progress import ChoiceProgress
from baton.router.dispatch.retries import RetryState
from baton.router.dispatch.view import Reservation
from baton.router.observe.trail import TrailWriter, ranks_of
from baton.router.request.request import ChoiceStream, ChoiceSummary, RouterRequest


class ChoiceRun:
    """Holds a choice between its opening and its end: its ``ticket`` in the queue, progress, retries and record.

    ``home`` is shared by a request's choices and resolves to the id of the decode worker that has the prompt's
    blocks, "" if there will be none. ``stream`` is read by the API surface; ``timer`` enforces the request's
    deadline.
    """

    __slots__ = (
        "__weakref__",
        "choice",
        "deadline",
        "home",
        "limit_s",
        "progress",
        "request",
        "retries",
        "stream",
        "summary",
        "ticket",
        "timer",
        "trail",
    )

    def __init__(
        self,
        request: RouterRequest,
        choice: int,
        ticket: Ticket[Reservation],
        home: asyncio.Future[str],
        progress: ChoiceProgress,
        trail: TrailWriter,
    ) -> None:
        self.request, self.choice, self.ticket, self.home = request, choice, ticket, home
        self.progress, self.trail, self.retries = progress, trail, RetryState()
        self.stream: ChoiceStream = progress.stream
        self.summary: ChoiceSummary = progress.summary
        self.timer: asyncio.Timeout | None = None
        self.limit_s: float | None = None  # seconds that it may take, once its time has begun
        self.deadline: float | None = None  # None: there is none, or its time hasn't begun

    def cancel_reason(self) -> str:
        """Returns the reason to give a worker when cancelling: the stream reader's own, else "deadline" or
        "retry".
        """
        if self.stream.cancel_reason:
            return self.stream.cancel_reason
        return "deadline" if self.timer is not None and self.timer.expired() else "retry"

    def place(self, reservation: Reservation, waited_s: float) -> None:
        """Notes in summary and record the workers of ``reservation``, taken after ``waited_s`` seconds in the
        queue.
        """
        taken, summary = reservation.taken, self.summary
        self.retries.placed({worker: info.incarnation for worker, info in reservation.infos.items()})
        summary.place(taken.way, taken.prefill, taken.decode, self.retries.attempts)
        summary.took(Station("queue", waited_s))
        weights = str(self.request.pin.weights or "")
        self.trail.placed(
            reservation.decision, self.progress.elapsed(), waited_s, weights, ranks_of(reservation.infos)
        )

    def begin(self, wire_id: str, traceparent: str) -> Attempt:
        """Starts and returns an attempt, dropping tokens that an earlier one produced but that were held back."""
        self.retries.begin()
        self.progress.restart()
        return Attempt(self.request, self.choice, wire_id, self.progress.tokens, traceparent)

    def take_decode(self, placed: Reservation, output: w.RequestTokens) -> None:
        """Takes the choice's part of a decode worker's frame; the first one resolves ``home``, because the prompt's
        blocks are there.
        """
        self.progress.take_decode(output)
        self.retries.feed()
        placed.mark_prefilled()
        if not self.home.done() and not self.progress.unscored:
            self.home.set_result(placed.taken.decode)

    def leave(self, worker_id: str, error: BatonError) -> None:
        """Notes in the record that the choice leaves worker ``worker_id`` because of ``error``."""
        self.trail.left(f"{worker_id}: {error.label}: {error.message}")

    def close(self) -> None:
        """Gives up the choice's place in the queue and ends its record, however its task ended."""
        self.ticket.leave()
        self.trail.end(self.stream.error)
        if not self.home.done() and self.choice == 0:
            self.home.set_result("")
