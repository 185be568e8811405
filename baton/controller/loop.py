"""The controller of the prefill:decode ratio: the leading router decides every few seconds, and acts or advises.

It changes workers' roles; where that can't help, it asks for more workers, or fewer. Knows nothing of how a
decision is made (``ratio_decision`` and ``replica_decision``, pure), how a worker changes
(``router.dispatch.role_control``) or comes (``replicas``). A new leader has no history, and waits a cool-down
first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.advice import Advice, AdviceStore, RatioPin, TimelineEntry, TwinError
from baton.cluster.config import BatonConfig
from baton.cluster.membership import WorkerEntry
from baton.cluster.metering.telemetry import RouterMetrics
from baton.cluster.store.lease import NamedLease
from baton.cluster.traffic import TrafficSlice, TrafficStore
from baton.controller import observation as observe
from baton.controller.advice import advice_of, joined_reasons, kinds_of, slos
from baton.controller.dial import MOST_REQUESTS, DialAnswer, DialQuestion
from baton.controller.dial_process import Dial
from baton.controller.metrics import ControlMetrics
from baton.controller.pressure import Demand, WorkerLimits
from baton.controller.ratio_decision import ControlSettings, History, RatioDecision, RatioObservation, decide
from baton.controller.replica_decision import ReplicaDecision, decide_replicas
from baton.controller.replicas import SLOT, ReplicaControl
from baton.controller.twin_error import twin_error
from baton.protos.errors import BatonError, Unavailable
from baton.protos.rpc import heed_cancel, settled
from baton.router.dispatch.role_control import RoleChange, RoleControl
from baton.tasks.beside import beside
from baton.tasks.lasting import count_failure

log = logging.getLogger("baton.controller")

LEASE_INTERVALS = 3.0  # intervals that the lead lasts, because one missed interval may not change it
LONGER = 6.0  # windows over which the shapes of answers are taken
TWIN_S = 60.0  # seconds over which predicted latencies are held beside measured ones
KEPT_LOOKS = 120  # looks whose predicted TPOT is kept
CHANGE_S = 30.0  # a worker that drains for longer is held by an operator, or stuck: it isn't waited for
JUMP_S = 2.0  # between two looks the wall clock differs by no more from the one that never jumps, unless it was set
NUMBERS = re.compile(r"[\d.]+")


class Members(Protocol):
    """Interface of the roster, which knows the workers that are members of the cluster."""

    def snapshot(self) -> Mapping[str, WorkerEntry]:
        """Returns slot -> member as last read from Redis, without waiting."""


class Controller:
    """Decides on roles and numbers of workers; ``run`` it in every router, of which one leads at a time.

    ``wall_clock`` returns Unix seconds.
    """

    def __init__(
        self,
        config: BatonConfig,
        members: Members,
        roles: RoleControl,
        traffic: TrafficStore,
        store: AdviceStore,
        lease: NamedLease,
        replicas: ReplicaControl,
        metrics: ControlMetrics,
        wall_clock: Callable[[], float],
    ) -> None:
        self._config, self._members, self._roles = config.controller, members, roles
        self._replicas, self._metrics = replicas, metrics
        self._traffic, self._store, self._lease, self._clock = traffic, store, lease, wall_clock
        self._chunk_tokens = config.worker.prefill_chunk_tokens
        self._ttft_s, self._tpot_s = slos(config)
        self._settings = ControlSettings(
            **{k: getattr(self._config, k) for k in ControlSettings.__struct_fields__ if hasattr(self._config, k)}
        )
        self._history = History()
        self._dial = Dial(self._config.dial_s)
        self._said = ""
        self._leads = False
        self._ahead = 0.0  # seconds that the wall clock is ahead of the event loop's
        self._draining: dict[str, float] = {}  # slot -> since when
        self._steps: deque[tuple[float, float]] = deque(maxlen=KEPT_LOOKS)  # at a look, predicted TPOT

    async def run(self) -> None:
        """Until cancelled, tries every ``interval_s`` to hold the leader's lease, and looks at the cluster if it
        does.
        """
        try:
            while True:
                await asyncio.sleep(self._config.interval_s)
                try:
                    await self._turn()
                except (BatonError, RedisError, OSError) as error:
                    log.warning("no decision this time: %s", error)
                except Exception:  # a router without a controller serves on, but nobody would know
                    log.exception("the controller failed at a look")
                    count_failure("controller")
                heed_cancel()
        finally:
            await self._dial.close()
            with contextlib.suppress(asyncio.CancelledError):
                await self._lease.leave()

    async def _turn(self) -> None:
        leads = await self._lease.hold()
        ahead = self._clock() - asyncio.get_running_loop().time()
        jumped, self._ahead = abs(ahead - self._ahead) > JUMP_S, ahead
        if leads and (jumped or not self._leads):  # what it remembers is of another clock, or another leader's
            self._history = History(changed_at=self._clock())  # an earlier leader may just have changed something
            self._replicas.lead(self._clock())
            self._draining.clear()
            self._steps.clear()
        elif self._leads and not leads:
            self._metrics.left()
        self._leads = leads
        if leads:
            await self.look()

    async def look(self) -> Advice:
        """Decides once by the cluster's present state, publishes the advice, acts on it in mode "auto", and returns
        it.
        """
        at, (asked, pin) = self._clock(), await self._store.wishes()
        mode = asked or self._config.mode
        longer = await self._traffic.recent(at - LONGER * self._config.window_s)
        longer = [s for s in longer if s.at < at + observe.FRESH_S]  # others are of a clock that was set back since
        members = self._members.snapshot()
        workers = [observe.ObservedWorker(e.info, e.load) for e in members.values()]
        looked = self._looked(at, workers, longer, pin)
        decision, self._history = decide(looked, self._history, self._settings)
        replicas = ReplicaDecision("hold", 0, 0)
        if len({w.info.model_id for w in workers}) > 1:
            text = f"{len({w.info.model_id for w in workers})} models share the cluster: roles are turned by hand"
            decision = RatioDecision("hold", looked.prefill, looked.decode, text, withheld="several models")
        elif self._config.most_workers:
            replicas = await self._replicated(looked, decision, members)
            decision = msgspec.structs.replace(decision, reason=joined_reasons(decision.reason, replicas.reason))
        dialled = self._dialled(looked, workers, longer)
        advice = advice_of(at, "pinned" if pin else mode, looked, decision, dialled)
        await self._store.put(advice)
        self._metrics.looked(advice, kinds_of(decision, replicas, mode))
        await self._act(looked, decision, replicas, mode)
        return advice

    async def _replicated(
        self, looked: RatioObservation, decision: RatioDecision, members: Mapping[str, WorkerEntry]
    ) -> ReplicaDecision:
        """Returns the decision on the number of workers, after recording the outcome of the last change."""
        control = self._replicas
        placed, news = await control.placed(looked.at, members)
        if news is not None:
            await self._note(news)
        found, control.history = decide_replicas(looked, decision, placed, control.history, control.settings)
        return found

    def _looked(
        self, at: float, workers: list[observe.ObservedWorker], longer: list[TrafficSlice], pin: RatioPin | None
    ) -> RatioObservation:
        now = [s for s in longer if s.at > at - self._config.window_s]
        asked = observe.demand(now, longer)
        known = observe.costs(workers, self._chunk_tokens, self._ttft_s, self._tpot_s, asked.context)
        prefill, decode = self._roles.usable()
        there = observe.backlog(workers, [], at)
        if known is not None and there.running:
            self._steps.append((at, observe.predicted_tpot(there, known, decode, asked.context)))
        return RatioObservation(
            at=at,
            prefill=prefill,
            decode=decode,
            demand=asked,
            backlog=observe.backlog(workers, now, at),
            workers=known,
            twin=self._twin(at, asked, known, prefill, decode, longer),
            pin=pin,
            pending=self._is_changing(at, workers),
            strayed=_strayed(workers, "decode" if prefill else "prefill") if not (prefill and decode) else 0,
        )

    def _is_changing(self, at: float, workers: list[observe.ObservedWorker]) -> bool:
        leaving = {w.info.worker_id for w in workers if w.info.state == "draining"}
        self._draining = {slot: self._draining.get(slot, at) for slot in leaving}
        return any(at - since < CHANGE_S + self._config.grace_s for since in self._draining.values())

    def _twin(
        self,
        at: float,
        asked: Demand,
        known: WorkerLimits | None,
        prefill: int,
        decode: int,
        longer: list[TrafficSlice],
    ) -> TwinError:
        """Returns the prediction's error over answers since the last change, because it is made for a cluster that
        stays as it is.
        """
        since = max(at - TWIN_S, self._history.changed_at)
        lately = [s for s in longer if s.at - s.seconds >= since]
        rates: tuple[float | None, float | None] = (None, None)
        if known is not None and observe.covered(lately) > TWIN_S / 2:
            steady = observe.demand(lately, longer)
            rates = observe.predicted_rate(steady, known, prefill, decode), observe.observed_rate(lately)
        twins = (t for s in lately for t in s.twins)
        steps = [step for when, step in self._steps if when >= since]
        return twin_error(twins, self._ttft_s, self._tpot_s, self._config.error_bound, *rates, steps)

    def _dialled(
        self, looked: RatioObservation, workers: list[observe.ObservedWorker], longer: list[TrafficSlice]
    ) -> DialAnswer | None:
        """The last simulated dial; a new simulation begins when it is due."""
        if looked.workers is not None and workers and self._dial.is_due(looked.at):
            longer = observe.newest(longer, MOST_REQUESTS)
            asked = DialQuestion(
                looked.prefill + looked.decode,
                looked.workers,
                observe.transfer(workers),
                observe.kv_bytes_per_token(workers[0].info.layout, longer),
                tuple(s for one in longer for s in one.served),
                observe.adapted_steps(workers, "prefill"),
                observe.adapted_steps(workers, "decode"),
            )
            self._dial.ask(asked, looked.at)
        return self._dial.answer

    # ---- acting --------------------------------------------------------------------------------------

    async def _act(
        self, looked: RatioObservation, decision: RatioDecision, replicas: ReplicaDecision, mode: str
    ) -> None:
        if self._leads and not self._lease.is_sure:
            log.warning("this look took longer than the lead lasts: it changes nothing")
            return
        before = looked.prefill, looked.decode
        after = decision.prefill, decision.decode
        if replicas.kind != "hold" and mode == "auto":
            await self._note(await self._replicas.ask(looked.at, before, replicas))
            return
        if decision.kind == "hold" or mode != "auto":
            kind = "hold" if decision.kind == replicas.kind == "hold" else "advise"
            after = replicas.after if replicas.kind != "hold" else after
            await self._note_once(TimelineEntry(looked.at, kind, before, after, decision.reason))
            return
        by = decision.prefill - looked.prefill
        role = "prefill" if by > 0 else "decode"
        names = self._roles.least_busy(role, abs(by))
        log.info("%d:%d -> %d:%d (%s): %s", *before, *after, ", ".join(names), decision.reason)
        change = TimelineEntry(looked.at, "rerole", before, after, decision.reason, tuple(names))
        try:
            change_roles = self._roles.move(
                names, role, self._config.grace_s, counted=before, wanted=self._require_free
            )
            made = await self._while_leading(change_roles)
        except BatonError as error:
            self._history = self._history.changed(self._clock(), by, self._config.cooldown_s)
            await self._note(msgspec.structs.replace(change, kind="failed", reason=f"{change.reason}; {error}"))
            return
        seconds = _longest(made)
        self._history = self._history.changed(self._clock(), by, seconds)
        await self._note(msgspec.structs.replace(change, seconds=seconds))

    async def _require_free(self) -> None:
        """Raises Unavailable if an operator has pinned the ratio, or set another mode, since the look began.

        Raises RedisError and OSError if nobody knows.
        """
        mode, pin = await self._store.wishes()
        if pin is not None or (mode or self._config.mode) != "auto":
            raise Unavailable("an operator has meanwhile pinned the ratio, or set another mode")

    async def _while_leading(self, change: Coroutine[object, None, list[RoleChange]]) -> list[RoleChange]:
        """Returns what ``change`` does. It may take minutes, in which no other router may take the lead: it would
        count a worker that loads what its role needs as one that is gone.
        """
        changing = asyncio.create_task(change, name="change of roles")
        try:
            while not changing.done():
                await asyncio.wait([changing], timeout=self._config.interval_s)
                await self._lease.hold()
            return changing.result()
        finally:
            changing.cancel()
            await settled([changing])

    async def _note_once(self, change: TimelineEntry) -> None:
        """A reason that differs from the last one in its numbers alone is no news for the timeline."""
        said = NUMBERS.sub("#", f"{change.kind} {change.before} {change.reason}")
        starting = not self._said and not any(change.before)  # workers that are yet to come are no news either
        if said != self._said and not starting:
            await self._note(change)

    async def _note(self, change: TimelineEntry) -> None:
        self._said = NUMBERS.sub("#", f"{change.kind} {change.before} {change.reason}")
        if change.kind == "failed":
            self._metrics.failed()
        await self._store.note(change)


@asynccontextmanager
async def controlling(
    config: BatonConfig,
    redis: Redis,
    router_id: str,
    roles: RoleControl,
    members: Members,
    store: AdviceStore,
    metrics: RouterMetrics,
    wall_clock: Callable[[], float] = time.time,
) -> AsyncIterator[None]:
    """While entered, runs the controller, which may become the leader; does nothing in mode "off"."""
    if config.controller.mode == "off":
        yield
        return
    namespace = config.cluster.namespace
    traffic = TrafficStore(redis, namespace)
    lease = NamedLease(redis, namespace, "controller", router_id, LEASE_INTERVALS * config.controller.interval_s)
    replicas, figures = ReplicaControl(redis, config), ControlMetrics(metrics, wall_clock)
    controller = Controller(config, members, roles, traffic, store, lease, replicas, figures, wall_clock)
    async with beside(controller.run, "controller"):
        yield


def _strayed(workers: list[observe.ObservedWorker], role: str) -> int:
    """Returns how many ready workers that were planned as ``role`` play another one now."""
    planned = (w.info for w in workers if SLOT.fullmatch(w.info.worker_id) and w.info.state == "ready")
    return sum(info.role != role and info.worker_id.startswith(role + "-") for info in planned)


def _longest(changes: list[RoleChange]) -> float:
    return max((c.seconds for c in changes), default=0.0)
