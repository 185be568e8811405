"""One choice of a request on its way: what was emitted, what failed, and the messages that are made of it.

Knows nothing of connections or policies; dispatch moves it from station to station.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from baton.protos.convert import run_from_pb, sampling_to_pb, stations_from_pb
from baton.protos.nouns import Station, TokenRun
from baton.protos.v1 import worker_pb2 as w
from baton.router.admission import Ticket
from baton.router.policies import Ask
from baton.router.request import ChoiceStream, RouterRequest, Summary
from baton.router.session import Lease
from baton.router.view import Reservation


class ChoiceRun:
    """The state that outlives one attempt. ``home`` resolves to the decode worker that has the prompt's blocks."""

    def __init__(
        self,
        request: RouterRequest,
        choice: int,
        context_class: str,
        ticket: Ticket[Reservation],
        home: asyncio.Future[str],
        clock: Callable[[], float],
    ) -> None:
        self.request, self.choice, self.ticket, self.home = request, choice, ticket, home
        summary = Summary(prompt_tokens=len(request.token_ids), context_class=context_class)
        self.stream = ChoiceStream(choice, summary)
        self.failures = 0
        self.avoid: set[str] = set()
        self.admitted = False
        self.nobody_since: float | None = None
        self.timer: asyncio.Timeout | None = None
        self._clock = clock
        self._opened = clock()
        self._first_at: float | None = None
        self._cached_known = False
        self._last: TokenRun | None = None

    @property
    def summary(self) -> Summary:
        """The stream's."""
        return self.stream.summary

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt, then what was emitted: what a new attempt must read."""
        return (*self.request.token_ids, *self.stream.emitted) if self.stream.emitted else self.request.token_ids

    @property
    def answered(self) -> bool:
        """The last token came."""
        return self._last is not None

    def why(self) -> str:
        """The reason a Cancel gives."""
        if self.stream.cancel_reason:
            return self.stream.cancel_reason
        return "deadline" if self.timer is not None and self.timer.expired() else "retry"

    def ask(self, hits: Mapping[str, int]) -> Ask:
        """The request as a policy sees it."""
        left = max(1, self.request.sampling.max_tokens - len(self.stream.emitted))
        return Ask(len(self.tokens), left, hits, frozenset(self.avoid))

    # ---- messages ------------------------------------------------------------------------------------

    def admit(self, wire_id: str, placed: Reservation, traceparent: str) -> w.Admit:
        """Asks the decode worker for a lease."""
        request = self.request
        return w.Admit(
            request_id=wire_id,
            model_id=request.model_id,
            adapter_id=request.adapter_id,
            token_ids=self.tokens,
            prompt_tokens=len(request.token_ids),
            sampling=sampling_to_pb(request.sampling),
            choice=self.choice,
            tenant_salt=request.tenant_salt,
            local=placed.taken.way == "local",
            priority=request.priority,
            traceparent=traceparent,
        )

    def prefill(
        self, lease: Lease, address: str, received: tuple[int, ...], router_id: str, traceparent: str
    ) -> w.PrefillRequest:
        """Asks a prefill worker to read the prompt and ship its blocks to ``address``."""
        request = self.request
        return w.PrefillRequest(
            request_id=lease.request_id,
            model_id=request.model_id,
            adapter_id=request.adapter_id,
            lease=lease.lease,
            epoch=lease.epoch,
            decode_address=address,
            token_ids=self.tokens,
            prompt_tokens=len(request.token_ids),
            held_blocks=lease.held_blocks,
            received_blocks=received,
            sampling=sampling_to_pb(request.sampling),
            choice=self.choice,
            tenant_salt=request.tenant_salt,
            priority=request.priority,
            router_id=router_id,
            traceparent=traceparent,
        )

    # ---- news ----------------------------------------------------------------------------------------

    def placed(self, reservation: Reservation, waited_s: float) -> None:
        """It has its workers."""
        taken, summary = reservation.taken, self.summary
        summary.way, summary.prefill_worker, summary.decode_worker = taken.way, taken.prefill, taken.decode
        summary.decision = reservation.decision.record()
        summary.attempts = self.failures + 1
        summary.took(Station("queue", waited_s))

    def from_decode(self, placed: Reservation, output: w.RequestTokens) -> None:
        """What a frame holds for us. The first one says that the prompt's blocks are there."""
        self._emit(output.run)
        placed.has_read()
        if not self.home.done():
            self.home.set_result(placed.taken.decode)
        if output.stations:
            self._stations(output.stations, ("prefill",))
        self._cached(output.cached_tokens)

    def from_prefill(self, response: w.PrefillResponse) -> None:
        """The first token, straight from where it was made."""
        self._emit(response.first)
        self._stations(response.stations, ("prefill", "transfer"))
        self._cached(response.cached_tokens)

    def close(self) -> None:
        """Its task is over, however it ended."""
        self.ticket.leave()
        if not self.home.done() and self.choice == 0:
            self.home.set_result("")

    def complete(self) -> None:
        """Give out the last run, which ends the stream: nothing more will be known. Idempotent."""
        if self._last is not None:
            self._push(self._last)
            if self._first_at is not None and "decode" not in self.summary.stations:
                self.summary.took(Station("decode", self._clock() - self._first_at))

    def _emit(self, pb: Any) -> None:
        """Each output once. The last run waits for ``complete``: usage and times are whole when it is seen."""
        run = run_from_pb(pb)
        if not run.finish_reason:
            self._push(run)
        elif self._last is None:
            self._last = run

    def _push(self, run: TokenRun) -> None:
        if self.stream.push(run) and self._first_at is None:
            self._first_at = self._clock()
            self.summary.took(Station("ttft", self._first_at - self._opened))

    def _stations(self, stations: Any, taken: tuple[str, ...]) -> None:
        """A worker's times; its own queue is not ours, and "decode" is measured here."""
        for station in stations_from_pb(stations):
            if station.name == "queue":
                self.summary.took(Station("prefill_queue", station.seconds))
            elif station.name in taken:
                self.summary.took(station)

    def _cached(self, tokens: int) -> None:
        """The first attempt's count is the request's: a replay finds what the request itself left."""
        if not self._cached_known:
            self._cached_known = True
            self.summary.cached_tokens = min(tokens, self.summary.prompt_tokens)
