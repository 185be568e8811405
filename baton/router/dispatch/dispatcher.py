"""A request's way through the cluster: queue, admit, prefill, decode; and elsewhere again when a worker is lost.

Knows nothing of text, HTTP, or how a policy chooses. One task per choice is the scope of all it holds: whatever
ends the task (the answer, a cancel, a deadline, an error) gives back its place, its lease and its call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import msgspec

from baton.cluster.telemetry import RouterMetrics, current_traceparent, span, trace_id_of
from baton.protos.errors import (
    AlreadyCommitted,
    BatonError,
    DeadlineExceeded,
    Draining,
    ModelNotFound,
    Unavailable,
    WorkerLost,
)
from baton.protos.nouns import WorkerInfo
from baton.protos.rpc import heed_cancel, settled
from baton.protos.v1 import worker_pb2 as w
from baton.router.dispatch.admission import Admission, load_of
from baton.router.dispatch.blame import Blame, Overdue
from baton.router.dispatch.choice_run import ChoiceRun
from baton.router.dispatch.placing import Placer
from baton.router.dispatch.role_control import RoleControl
from baton.router.dispatch.view import ClusterView, Reservation
from baton.router.observe.decisions import DecisionLog
from baton.router.request.context_class import ContextClasses
from baton.router.request.request import ChoiceStream, ChoiceSummary, RouterRequest, ServedModel
from baton.router.workers.call_errors import first_of
from baton.router.workers.decode_session import DecodeLease
from baton.router.workers.link_table import STALL_S, LinkTable

log = logging.getLogger("baton.router")


class DispatchSettings(msgspec.Struct, frozen=True):
    """Tries per choice; seconds to wait for a worker to appear, for a full one to empty, for a late reply.

    ``hedge_factor`` times the predicted seconds, ``hedge_least_s`` at least, after which a prefill that hasn't
    answered is taken over by another worker, once per request; 0: never. ``stall_s`` without any progress of a
    worker's engine, and its requests go elsewhere.
    """

    max_attempts: int = 3
    worker_wait_s: float = 3.0
    full_wait_s: float = 0.25
    late_reply_s: float = 1.0
    hedge_factor: float = 0.0
    hedge_least_s: float = 0.25
    stall_s: float = STALL_S


class Dispatcher:
    """Opens requests. Its parts are made and run by ``router.compose``."""

    def __init__(
        self,
        view: ClusterView,
        links: LinkTable,
        admission: Admission,
        classes: ContextClasses,
        placer: Placer,
        decisions: DecisionLog,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        settings: DispatchSettings = DispatchSettings(),
    ) -> None:
        self._view, self._links, self._admission = view, links, admission
        self._classes, self._placer, self._decisions = classes, placer, decisions
        self._metrics, self._clock, self._settings = metrics, clock, settings
        self._blame = Blame(view, metrics, settings.max_attempts, settings.full_wait_s)
        self._serial = itertools.count(1)
        self._open: dict[asyncio.Task[None], ChoiceRun] = {}
        self.listeners: list[Callable[[RouterRequest, ChoiceSummary], object]] = []
        self.on_refused: Callable[[RouterRequest, str], object] = lambda request, context_class: None
        self.roles: RoleControl | None = None
        view.on_change = admission.wake

    # ---- what the surfaces call ----------------------------------------------------------------------

    def open(self, request: RouterRequest) -> list[ChoiceStream]:
        """One stream per choice; the first reads the prompt, the others follow it to the same decode worker.

        Raises Overloaded, Draining and ModelNotFound at once; everything later is raised by the iteration.
        """
        request, context_class = self._classed(request)
        try:
            self._require_model(request.model_id)
            first = self._admission.join(request.model_id, context_class, load_of(request))
        except BatonError as error:
            self._decisions.refused(request, context_class, error)
            self.on_refused(request, context_class)
            raise
        with ExitStack() as undo:
            undo.callback(first.leave)
            tickets = [first, *(self._admission.beside(first) for _ in range(1, request.n))]
            home: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            record = self._decisions.opened(request, context_class)
            changed = partial(self._decisions.changed, record)
            runs = [ChoiceRun(request, i, context_class, t, home, self._clock) for i, t in enumerate(tickets)]
            for run in runs:
                run.keeps(self._decisions.trail(record, run.choice, run.summary), changed)
                self._start(run)
                undo.callback(run.stream.cancel, "failed")
            streams = [run.stream for run in runs]
            undo.pop_all()  # from here on it is for the streams' readers to end them
        return streams

    def models(self) -> tuple[ServedModel, ...]:
        """What the workers serve."""
        return self._view.models()

    def queued(self) -> int:
        """Requests that wait for a place."""
        return self._admission.queued

    def waiting(self) -> dict[str, int]:
        """The same, by context class."""
        return {name: self._admission.waiting(name) for name in self._classes.names}

    def reachable(self) -> frozenset[str]:
        """Ids of the workers whose link is up."""
        return frozenset(link.info.worker_id for link in self._links if link.up)

    def reachable_in(self, role: str) -> int:
        """How many of them play ``role``."""
        return self._view.reachable(role)

    def ready(self) -> bool:
        """Whether some worker could write an answer now."""
        return self._view.ready()

    @property
    def decisions(self) -> DecisionLog:
        """Why requests went where they went."""
        return self._decisions

    def __len__(self) -> int:
        """Choices whose task still runs."""
        return len(self._open)

    async def close(self) -> None:
        """Take nothing new, cancel what runs ("shutdown"), and wait until it is gone."""
        self._admission.close()
        for run in list(self._open.values()):
            run.stream.cancel_reason = "shutdown"
            run.stream.fail(Draining("the router is shutting down"))
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    # ---- the way -------------------------------------------------------------------------------------

    async def _serve(self, run: ChoiceRun) -> None:
        """Queue, then attempt; again while workers are lost. Its place in the queue stays its own."""
        if run.choice > 0:
            await asyncio.shield(run.home)
        while not run.answered:
            with await self._place(run) as placed, self._running(run):
                try:
                    await self._attempt(run, placed)
                except BatonError as error:
                    if not run.answered:
                        placed.close()
                        self._blame(run, placed.taken.decode, error, refused=not run.admitted)

    async def _place(self, run: ChoiceRun, lease_on: str = "") -> Reservation:
        """Wait until the policy finds workers with room; for a leased request, a prefill worker alone."""
        since = self._clock()
        attempt = await self._placer.attempt(run, lease_on)
        queued = self._metrics.sum("queued", run.request.model_id, run.summary.context_class)
        with span("queue"), queued:
            placed = await run.ticket.wait(attempt)
        with ExitStack() as undo:
            undo.callback(placed.close)
            run.placed(placed, self._clock() - since)
            self._metrics.sum("decisions", placed.taken.way, placed.taken.reader).added += 1
            undo.pop_all()
        return placed

    async def _attempt(self, run: ChoiceRun, placed: Reservation) -> None:
        """Two children of one scope: the lease on the decode worker, and the prefill that fills it."""
        run.begins()
        link = self._links.decode(placed.taken.decode)
        if not run.request.pin.allows(link.info):
            raise WorkerLost(f"{placed.taken.decode} was replaced by one of other weights")
        wire_id = f"{run.request.request_id}:{run.choice}:{next(self._serial)}"
        admit = run.admit(wire_id, placed, current_traceparent())
        async with link.admit(admit, partial(run.from_decode, placed), run.why) as lease:
            run.admitted = True
            placed.answered()
            try:
                async with asyncio.TaskGroup() as scope:
                    reading = scope.create_task(self._read(run, lease, placed, link.info))
                    await lease.ended
                    await self._let_finish(reading)
            except BaseExceptionGroup as group:
                heed_cancel()  # a group that holds an error drops the cancellation that came with it
                raise first_of(group) from None

    async def _read(self, run: ChoiceRun, lease: DecodeLease, placed: Reservation, to: WorkerInfo) -> None:
        """Prefill; on a failure Rearm (received blocks are kept) and elsewhere. Local way: nothing to do."""
        received: tuple[int, ...] = ()
        while placed.taken.way == "prefill":
            router_id = self._links.router_id
            try:
                message = run.prefill(lease, to, received, placed.taken, router_id, current_traceparent())
                run.from_prefill(await self._prefill(run, placed, message))
                break
            except BatonError as error:
                if run.answered:
                    break
                placed.has_read()
                self._blame(run, placed.taken.prefill, error, refused=True)
            finally:
                placed.has_read()
            try:
                received = await lease.rearm()
            except AlreadyCommitted:
                break  # every block was in: only the answer to us was lost
            placed = await self._place(run, lease_on=placed.taken.decode)
        if run.answered:
            run.complete()

    async def _prefill(self, run: ChoiceRun, placed: Reservation, message: w.PrefillRequest) -> w.PrefillResponse:
        """The call itself. Raises Overdue when it takes too long and somebody else could do it."""
        link, pinned = self._links.prefill(placed.taken.prefill), run.request.pin.weights
        if pinned is not None and link.info.fingerprint != pinned.fingerprint:
            raise WorkerLost(f"{placed.taken.prefill} was replaced by one of other weights")
        try:
            async with asyncio.timeout(self._hedge_after(run, placed)):
                return await link.prefill(message, self._call_limit(run))
        except TimeoutError:
            run.hedged = True
            raise Overdue(f"{placed.taken.prefill} took much longer than predicted") from None

    def _hedge_after(self, run: ChoiceRun, placed: Reservation) -> float | None:
        """Seconds to give a prefill before somebody else gets it; None: as long as it takes."""
        settings, taken = self._settings, placed.taken
        if not settings.hedge_factor or run.hedged or not self._placer.others(run, taken):
            return None
        predicted = sum(taken.terms.get(t, 0.0) for t in ("queue", "read", "ship"))
        return max(settings.hedge_least_s, settings.hedge_factor * predicted)

    # ---- ends ----------------------------------------------------------------------------------------

    def _start(self, run: ChoiceRun) -> None:
        task = asyncio.create_task(self._live(run), name=f"{run.request.request_id} choice {run.choice}")
        self._open[task] = run
        run.stream.on_cancel(task.cancel)
        task.add_done_callback(self._over)

    def _running(self, run: ChoiceRun) -> AbstractContextManager[None]:
        """Counts it among those past the queue."""
        return self._metrics.sum("running", run.request.model_id, run.summary.context_class)

    def _over(self, task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before its first step."""
        run = self._open.pop(task)
        if not run.stream.ended:  # cancelled, but not by its reader, who waits: gRPC does that as a channel closes
            run.stream.fail(Unavailable("the router lost this request on its way; send it again"))
        run.close()
        for tell in self.listeners:
            tell(run.request, run.summary)

    async def _live(self, run: ChoiceRun) -> None:
        """The whole way; whatever ends it ends the stream."""
        attributes = {"baton.context_class": run.summary.context_class, "baton.request_id": run.request.request_id}
        try:
            with span("route", run.request.traceparent, attributes) as route:
                run.summary.trace_id = trace_id_of(route)
                async with asyncio.timeout(self._remaining(run)) as run.timer:
                    await self._serve(run)
            run.complete()
        except TimeoutError:
            run.stream.fail(DeadlineExceeded("the request's deadline passed before its answer was complete"))
        except BatonError as error:
            run.stream.fail(error)
        except Exception as error:
            log.exception("%s failed in the router", run.request.request_id)
            run.stream.fail(BatonError(f"the router failed on this request: {error}"))

    async def _let_finish(self, reading: asyncio.Task[None]) -> None:
        """The answer is complete; the prefill's own reply, with its times, may be a moment behind."""
        await asyncio.wait([reading], timeout=self._settings.late_reply_s)
        reading.cancel()
        await settled([reading])

    def _remaining(self, run: ChoiceRun) -> float | None:
        deadline = run.request.deadline
        return None if deadline is None else max(0.0, deadline - self._clock())

    def _call_limit(self, run: ChoiceRun) -> float | None:
        """For a worker's sake alone: our own timer goes off first."""
        remaining = self._remaining(run)
        return None if remaining is None else remaining + 1.0

    def _classed(self, request: RouterRequest) -> tuple[RouterRequest, str]:
        """Its class, whose SLOs it has unless it named its own."""
        found = self._classes.of(len(request.token_ids))
        ttft, tpot = request.slo_ttft_s or found.slo_ttft_s, request.slo_tpot_s or found.slo_tpot_s
        if (ttft, tpot) != (request.slo_ttft_s, request.slo_tpot_s):
            request = msgspec.structs.replace(request, slo_ttft_s=ttft, slo_tpot_s=tpot)
        return request, found.name

    def _require_model(self, model_id: str) -> None:
        served = [m.model_id for m in self._view.models()]
        if served and model_id not in served:
            raise ModelNotFound(f"no model {model_id!r} here; there is {', '.join(served)}", "model")
