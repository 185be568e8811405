"""One choice of a request on its way: what was emitted, what failed, and the messages that are made of it.

Knows nothing of connections or policies; dispatch moves it from station to station.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from baton.protos.convert import logprobs_from_pb, run_from_pb, sampling_to_pb, stations_from_pb
from baton.protos.errors import BatonError, WorkerLost
from baton.protos.nouns import Station, TokenRun, WorkerInfo
from baton.protos.v1 import common_pb2 as c
from baton.protos.v1 import worker_pb2 as w
from baton.router.dispatch.admission import Ticket
from baton.router.dispatch.view import Reservation
from baton.router.observe.trail import Trail
from baton.router.policies import Option, RoutingRequest
from baton.router.request.request import ChoiceStream, ChoiceSummary, RouterRequest
from baton.router.workers.decode_session import DecodeLease

MOMENT_S = 1e-3


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
        summary = ChoiceSummary(
            prompt_tokens=len(request.token_ids),
            context_class=context_class,
            slo_ttft_s=request.slo_ttft_s,
            slo_tpot_s=request.slo_tpot_s,
        )
        self.stream = ChoiceStream(choice, summary, clock)
        self.failures = self.moves = self.suspected = 0
        self.fed = False  # its worker has given it a token
        self.avoid: set[str] = set()
        self.admitted = False
        self.hedged = False
        self.nobody_since: float | None = None
        self.timer: asyncio.Timeout | None = None
        self._clock = clock
        self._opened = clock()
        self._first_at: float | None = None
        self._decoding = False
        self._cached_known = False
        self._last: TokenRun | None = None
        asked = request.sampling.prompt_logprobs is not None or bool(request.sampling.pooling)
        self._unscored = choice == 0 and asked
        self._early: list[TokenRun] = []
        self._trail: Trail | None = None
        self._changed: Callable[[], None] = lambda: None

    def keeps(self, trail: Trail, changed: Callable[[], None]) -> None:
        """Write its way down there; ``changed`` tells that there is more of it."""
        self._trail, self._changed = trail, changed

    @property
    def summary(self) -> ChoiceSummary:
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

    def routing_request(self, hits: Mapping[str, int]) -> RoutingRequest:
        """The request as a policy sees it."""
        request = self.request
        left = max(1, request.sampling.max_tokens - len(self.stream.emitted))
        tokens = len(request.token_ids) + len(self.stream.emitted)
        return RoutingRequest(tokens, left, hits, frozenset(self.avoid), self._ttft_left(), request.slo_tpot_s)

    def _ttft_left(self) -> float:
        """Seconds of the TTFT that was asked for; 0 when none was, or the first token is out."""
        if not self.request.slo_ttft_s or self._first_at is not None:
            return 0.0
        return max(MOMENT_S, self.request.slo_ttft_s - (self._clock() - self._opened))

    # ---- messages ------------------------------------------------------------------------------------

    def admit(self, wire_id: str, placed: Reservation, traceparent: str) -> w.Admit:
        """Asks the decode worker for a lease."""
        self.fed = False
        request = self.request
        return w.Admit(
            request_id=wire_id,
            model_id=request.model_id,
            adapter_id=request.adapter_id,
            token_ids=self.tokens,
            prompt_tokens=len(request.token_ids),
            sampling=self._sampling(),
            choice=self.choice,
            tenant_salt=request.tenant_salt,
            local=placed.taken.way == "local",
            priority=request.priority,
            traceparent=traceparent,
            prediction=request.prediction,
        )

    def prefill(
        self,
        lease: DecodeLease,
        to: WorkerInfo,
        received: tuple[int, ...],
        taken: Option,
        router_id: str,
        traceparent: str,
    ) -> w.PrefillRequest:
        """Asks a prefill worker to read the prompt and ship its blocks to ``to``."""
        request = self.request
        return w.PrefillRequest(
            request_id=lease.request_id,
            model_id=request.model_id,
            adapter_id=request.adapter_id,
            lease=lease.lease,
            epoch=lease.epoch,
            decode_address=to.address,
            decode_incarnation=to.incarnation,
            token_ids=self.tokens,
            prompt_tokens=len(request.token_ids),
            held_blocks=lease.held_blocks,
            received_blocks=received,
            sampling=self._sampling(),
            choice=self.choice,
            tenant_salt=request.tenant_salt,
            priority=request.priority,
            router_id=router_id,
            traceparent=traceparent,
            fetch_address=taken.fetch_address,
            fetch_blocks=taken.fetch_blocks,
            fetch_limit_s=taken.fetch_limit_s,
        )

    def _sampling(self) -> c.Sampling:
        """The prompt is scored once, for the first choice."""
        out = sampling_to_pb(self.request.sampling)
        if self.choice:
            out.ClearField("prompt_logprobs")
        return out

    # ---- news ----------------------------------------------------------------------------------------

    def placed(self, reservation: Reservation, waited_s: float) -> None:
        """It has its workers."""
        taken, summary = reservation.taken, self.summary
        summary.way, summary.prefill_worker, summary.decode_worker = taken.way, taken.prefill, taken.decode
        summary.attempts = self.failures + self.moves + 1
        summary.took(Station("queue", waited_s))
        if self._trail is not None:
            on = str(self.request.pin.weights or "")
            self._trail.placed(reservation.decision, self._clock() - self._opened, waited_s, on)
            self._changed()

    def begins(self) -> None:
        """Forgets what an earlier attempt wrote and didn't give out: this one writes it again, maybe otherwise."""
        self.admitted = False
        self._early.clear()

    def left(self, worker_id: str, error: BatonError) -> None:
        """It goes elsewhere."""
        if self._trail is not None:
            self._trail.left(f"{worker_id}: {error.label}: {error.message}")

    def from_decode(self, placed: Reservation, output: w.RequestTokens) -> None:
        """What a frame holds for us. The first one says that the prompt's blocks are there."""
        self._scored(output)
        self._emit(output.run)
        self.fed = True
        placed.has_read()
        if not self.home.done() and not self._unscored:
            self.home.set_result(placed.taken.decode)
        if output.stations:
            self._stations(output.stations, ("prefill",))
        self._cached(output.cached_tokens)

    def from_prefill(self, response: w.PrefillResponse) -> None:
        """The first token, straight from where it was made."""
        self._scored(response)
        self._emit(response.first)
        self._stations(response.stations, ("fetch", "prefill", "transfer"))
        self._cached(response.cached_tokens)

    def close(self) -> None:
        """Its task is over, however it ended."""
        self.ticket.leave()
        if self._trail is not None:
            self._trail.over = True
            if self.stream.error is not None:
                self._trail.failed(self.stream.error)
            self._changed()
        if not self.home.done() and self.choice == 0:
            self.home.set_result("")

    def complete(self) -> None:
        """Give out the last run, which ends the stream: nothing more will be known. Idempotent."""
        if self._last is not None:
            if self._unscored:
                self.stream.fail(WorkerLost("what the prompt gave was lost with its prefill worker: ask again"))
            self._push(self._last)
            if self._first_at is not None and "decode" not in self.summary.stations:
                self.summary.took(Station("decode", self._clock() - self._first_at))

    def _emit(self, pb: Any) -> None:
        """Each output once. The last run waits for ``complete``: usage and times are whole when it is seen."""
        run = run_from_pb(pb)
        if self._unscored and not run.finish_reason:
            self._early.append(run)
        elif not run.finish_reason:
            self._push(run)
        elif self._last is None:
            self._last = run
            self.request.pin.fix()

    def _scored(self, news: w.RequestTokens | w.PrefillResponse) -> None:
        """What is known of the prompt, once; tokens that came before it follow."""
        alone = len(self.request.token_ids) == 1 and not self.request.sampling.pooling
        if self._unscored and (news.prompt_logprobs or news.pooled or alone):
            self._unscored = False
            self.request.pin.fix()
            self.summary.pooled = news.pooled
            self.summary.prompt_logprobs = tuple(map(logprobs_from_pb, news.prompt_logprobs))
            early, self._early = self._early, []
            for run in early:
                self._push(run)

    def _push(self, run: TokenRun) -> None:
        if not self.stream.push(run):
            return
        self.request.pin.fix()
        if self._first_at is None:
            self._first_at = self._clock()
            self.summary.took(Station("ttft", self._first_at - self._opened))
        elif not self._decoding:
            self._decoding = True
            self.summary.took(Station("first_decode", self._clock() - self._first_at))

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
