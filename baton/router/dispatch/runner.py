"""Runs a choice through the cluster: queue, admit, prefill, decode; and again on other workers if one is lost.

Knows nothing of text, HTTP, or how a policy chooses. It runs in the choice's own task, whose end gives back all
that the choice holds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from functools import partial

import msgspec

from baton.cluster.metering.telemetry import RouterMetrics, current_traceparent, span, trace_id_of
from baton.protos.errors import AdapterNotLoaded, AlreadyCommitted, BatonError, DeadlineExceeded, WorkerLost
from baton.protos.nouns import Station, WorkerInfo
from baton.protos.rpc import heed_cancel, settled
from baton.protos.v1 import worker_pb2 as w
from baton.router.dispatch.adapters.loads import AdapterLoads
from baton.router.dispatch.blame import Blame, Overdue
from baton.router.dispatch.choice_run import ChoiceRun
from baton.router.dispatch.messages import Attempt, admit_message, prefill_message
from baton.router.dispatch.placing import Placer
from baton.router.dispatch.view import Reservation
from baton.router.workers.call_errors import first_of
from baton.router.workers.decode_session import DecodeLease
from baton.router.workers.link import STALL_S, DecodeLink
from baton.router.workers.link_table import LinkTable

log = logging.getLogger("baton.router")


class DispatchSettings(msgspec.Struct, frozen=True):
    """Limits of dispatch: failures per choice, and seconds to wait.

    ``worker_wait_s``: for any decode worker to appear; ``full_wait_s``: before a full worker is tried again;
    ``late_reply_s``: for a prefill's reply after the answer's end. A prefill that takes ``hedge_factor`` times its
    prediction, ``hedge_least_s`` at least, is given to another worker, once per request (0: never). After
    ``stall_s`` without progress of a worker's engine, its requests go elsewhere.
    """

    max_attempts: int = 3
    worker_wait_s: float = 3.0
    full_wait_s: float = 0.25
    late_reply_s: float = 1.0
    hedge_factor: float = 0.0
    hedge_least_s: float = 0.25
    stall_s: float = STALL_S


class ChoiceRunner:
    """Runs choices through the cluster, each in the caller's task."""

    def __init__(
        self,
        links: LinkTable,
        placer: Placer,
        blame: Blame,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        adapters: AdapterLoads,
        settings: DispatchSettings = DispatchSettings(),
    ) -> None:
        self.clock = clock
        self._links, self._placer, self._blame, self._adapters = links, placer, blame, adapters
        self._metrics, self._settings = metrics, settings
        self._serial = itertools.count(1)

    async def run(self, run: ChoiceRun) -> None:
        """Runs a choice until its stream has ended, with its answer or an error; raises only if cancelled."""
        attributes = {"baton.context_class": run.summary.context_class, "baton.request_id": run.request.request_id}
        if run.request.context.adapter_id:
            attributes["baton.adapter"] = run.request.context.adapter_id
        deadline = run.request.context.deadline
        run.limit_s = None if deadline is None else max(0.0, deadline - self.clock())
        try:
            with span("route", run.request.context.traceparent, attributes) as route:
                run.summary.name_trace(trace_id_of(route))
                async with asyncio.timeout(None) as run.timer:
                    if not run.request.context.can_wait:
                        self._begin_time(run)
                    await self._serve(run)
            run.progress.complete()
        except TimeoutError:
            time = "its time" if run.limit_s is None else f"{run.limit_s:.3g} s"
            text = f"the answer was not complete within {time}"
            run.stream.fail(DeadlineExceeded(f"{text}: the request's own timeout, or router.request_timeout_s"))
        except BatonError as error:
            run.stream.fail(error)
        except Exception as error:
            log.exception("%s failed in the router", run.request.request_id)
            run.stream.fail(BatonError(f"the router failed on this request: {error}"))

    # ---- the way -------------------------------------------------------------------------------------

    async def _serve(self, run: ChoiceRun) -> None:
        """Queue, then attempt; again while workers are lost. Its place in the queue stays its own."""
        if run.choice > 0:
            await asyncio.shield(run.home)
        running = (run.request.model_id, run.summary.context_class)
        while not run.progress.answered:
            with await self._place(run) as placed, self._metrics.sum("running", *running):
                try:
                    await self._attempt(run, placed)
                except BatonError as error:
                    if not run.progress.end_where_full():
                        placed.close()
                        self._blame(run, placed.taken.decode, error, refused=not run.retries.admitted)

    async def _place(self, run: ChoiceRun, lease_on: str = "") -> Reservation:
        """Wait until the policy finds workers with room; for a leased request, a prefill worker alone.

        Others may wait for the seat that a leased request holds, so it is tried before them.
        """
        since = self.clock()
        await self._placer.pause(run, lease_on)
        attempt = await self._placer.attempt(run, lease_on)
        queued = self._metrics.sum("queued", run.request.model_id, run.summary.context_class)
        with span("queue"), queued:
            placed = await run.ticket.wait(attempt, leads=bool(lease_on))
        try:
            self._begin_time(run)
            run.place(placed, self.clock() - since)
            self._metrics.sum("decisions", placed.taken.way, placed.taken.reader).added += 1
        except BaseException:
            placed.close()
            raise
        return placed

    async def _attempt(self, run: ChoiceRun, placed: Reservation) -> None:
        """Two children of one scope: the lease on the decode worker, and the prefill that fills it."""
        wire_id = f"{run.request.request_id}:{run.choice}:{next(self._serial)}"
        attempt = run.begin(wire_id, current_traceparent())
        link = self._links.decode(placed.taken.decode)
        if not run.request.pin.allows(link.info):
            raise WorkerLost(f"{placed.taken.decode} was replaced by one of other weights")
        await self._bring_adapter(run, placed)
        loads = link.loads
        try:
            await self._lease(run, attempt, placed, link)
        except AdapterNotLoaded:
            if not run.retries.admitted:
                link.lacks(run.request.context.adapter_id, loads)
            raise

    async def _lease(self, run: ChoiceRun, attempt: Attempt, placed: Reservation, link: DecodeLink) -> None:
        """Holds the lease on the decode worker until the answer is complete."""
        admit = admit_message(attempt, local=placed.taken.way == "local")
        async with link.admit(admit, partial(run.take_decode, placed), run.cancel_reason) as lease:
            run.retries.admit()
            placed.answered()
            try:
                async with asyncio.TaskGroup() as scope:
                    reading = scope.create_task(self._read(run, attempt, lease, placed, link.info))
                    await lease.ended
                    await self._let_finish(reading)
            except BaseExceptionGroup as group:
                heed_cancel()  # a group that holds an error drops the cancellation that came with it
                raise first_of(group) from None

    async def _bring_adapter(self, run: ChoiceRun, placed: Reservation) -> None:
        """Wait until the decode worker has the request's adapter; meanwhile the prefill worker gets it too."""
        adapter_id, since = run.request.context.adapter_id, self.clock()
        link = self._links.decode(placed.taken.decode)
        if not adapter_id:
            return
        if placed.taken.prefill:
            self._adapters.begin(self._links.prefill(placed.taken.prefill), adapter_id)
        if not link.holds(adapter_id):
            with span("adapter", attributes={"baton.adapter": adapter_id}):
                await self._adapters.bring(link, adapter_id)
            run.summary.took(Station("adapter", self.clock() - since))

    async def _read(
        self, run: ChoiceRun, attempt: Attempt, lease: DecodeLease, placed: Reservation, to: WorkerInfo
    ) -> None:
        """Prefill; on a failure Rearm (received blocks are kept) and elsewhere. Local way: nothing to do.

        A handoff that broke is held against the prefill worker once its decode worker has answered the Rearm: that
        one may be gone, and is one failure then, not two. It is held against the decode worker, by raising it,
        where only another one of those is left to try.
        """
        received: tuple[int, ...] = ()
        while placed.taken.way == "prefill":
            broken: BatonError | None = None
            try:
                message = prefill_message(attempt, lease, to, received, placed.taken, self._links.router_id)
                run.progress.take_prefill(await self._prefill(run, placed, message))
                break
            except BatonError as error:
                if run.progress.answered:
                    break
                placed.mark_prefilled()
                broken = error if error.param == "decode_address" else None
                if broken is None:
                    self._blame(run, placed.taken.prefill, error, refused=True)
            finally:
                placed.mark_prefilled()
            try:
                received = await lease.rearm()
            except AlreadyCommitted:
                break  # every block was in: only the answer to us was lost
            if broken is not None:
                if self._placer.elsewhere(run, placed.taken):
                    raise broken
                self._blame(run, placed.taken.prefill, broken, refused=True)
            placed = await self._place(run, lease_on=placed.taken.decode)
        if run.progress.answered:
            run.progress.complete()

    async def _prefill(self, run: ChoiceRun, placed: Reservation, message: w.PrefillRequest) -> w.PrefillResponse:
        """Calls the prefill worker. Raises Overdue when it takes too long and somebody else could do it."""
        link, pinned = self._links.prefill(placed.taken.prefill), run.request.pin.weights
        if pinned is not None and link.info.fingerprint != pinned.fingerprint:
            raise WorkerLost(f"{placed.taken.prefill} was replaced by one of other weights")
        await self._adapters.bring(link, run.request.context.adapter_id)
        loads = link.loads
        try:
            async with asyncio.timeout(self._hedge_after(run, placed)):
                return await link.prefill(message, self._call_limit(run))
        except AdapterNotLoaded:
            link.lacks(run.request.context.adapter_id, loads)
            raise
        except TimeoutError:
            run.retries.hedge()
            raise Overdue(f"{placed.taken.prefill} took much longer than predicted") from None

    def _hedge_after(self, run: ChoiceRun, placed: Reservation) -> float | None:
        """Seconds to give a prefill before somebody else gets it; None: as long as it takes.

        So it is where its reply brings what the prompt gives: the blocks may all be in when it is given up.
        """
        settings, taken = self._settings, placed.taken
        if not settings.hedge_factor or run.retries.hedged or run.progress.unscored:
            return None
        if not self._placer.others(run, taken):
            return None
        predicted = sum(taken.terms.get(t, 0.0) for t in ("queue", "read", "ship"))
        return max(settings.hedge_least_s, settings.hedge_factor * predicted)

    async def _let_finish(self, reading: asyncio.Task[None]) -> None:
        """The answer is complete; the prefill's own reply, with its times, may be a moment behind."""
        await asyncio.wait([reading], timeout=self._settings.late_reply_s)
        reading.cancel()
        await settled([reading])

    # ---- time ----------------------------------------------------------------------------------------

    def _begin_time(self, run: ChoiceRun) -> None:
        """Has the choice end at its deadline from now on; it knows it already if it has been placed before."""
        if run.limit_s is None or run.deadline is not None:
            return
        run.deadline = self.clock() + run.limit_s
        assert run.timer is not None, "it runs"
        run.timer.reschedule(asyncio.get_running_loop().time() + run.limit_s)

    def _remaining(self, run: ChoiceRun) -> float | None:
        return None if run.deadline is None else max(0.0, run.deadline - self.clock())

    def _call_limit(self, run: ChoiceRun) -> float | None:
        """Returns the call's deadline for the worker's sake alone: our own timer goes off first."""
        remaining = self._remaining(run)
        return None if remaining is None else remaining + 1.0
