"""Puts the router's core together and runs it: links, view, queue, dispatcher. Knows nothing of REST or text.

roster ─┐                        ┌─ admission ◀─ throttle
        ├─▶ view ◀─ revision ──▶─┘       ▲
links ──┘     ▲                          │
              └── placer ◀── runner ◀── dispatcher ──▶ observers, decisions
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Protocol, runtime_checkable

import msgspec

from baton.cluster.metering.telemetry import RouterMetrics
from baton.cluster.store.patience import CircuitBreaker
from baton.router.adapters.registry import AdapterRegistry
from baton.router.dispatch.adapters.control import AdapterBounds, AdapterControl
from baton.router.dispatch.adapters.keeper import AdapterKeeper
from baton.router.dispatch.adapters.loads import AdapterLoads
from baton.router.dispatch.admission import Admission
from baton.router.dispatch.affinity import SessionHomes
from baton.router.dispatch.blame import Blame
from baton.router.dispatch.dispatcher import Dispatcher, DispatchObservers, EndObserver
from baton.router.dispatch.placing import LastWords, Placer
from baton.router.dispatch.prefix_hints import PrefixHints, PrefixLookup
from baton.router.dispatch.revision import ClusterRevision
from baton.router.dispatch.role_control import ExclusiveTurn, RoleControl
from baton.router.dispatch.runner import ChoiceRunner, DispatchSettings
from baton.router.dispatch.throttle import Throttle
from baton.router.dispatch.view import ClusterView, ViewSettings
from baton.router.observe.adapter_counts import AdapterCounts
from baton.router.observe.decisions import DecisionLog, DecisionStore, RecordObserver
from baton.router.policies import load_policy
from baton.router.request.context_class import ContextClasses, ContextClassLike
from baton.router.request.request import ChoiceSummary, RouterRequest
from baton.router.workers.link_table import LinkTable
from baton.router.workers.roster import RosterReader
from baton.tasks.lasting import lasting
from baton.tls.rpc import PLAIN, Dialer


class CoreConfig(Protocol):
    """Declares what the core reads of the router's config; ``cluster.config.RouterConfig`` has it."""

    @property
    def policy(self) -> str:
        """Returns the name of the routing policy, a module of router/policies."""

    @property
    def context_classes(self) -> Iterable[ContextClassLike]:
        """Returns the context classes in rising order of prompt length."""

    @property
    def max_queue(self) -> int:
        """Returns how many requests may wait, per context class."""

    @property
    def max_inflight_bytes(self) -> int:
        """Returns the limit of estimated bytes that requests in flight may hold, prompts and answers together."""

    @property
    def local_prefill_max_tokens(self) -> int:
        """Returns the number of uncached tokens up to which a decode worker prefills a prompt itself."""


@runtime_checkable
class Refreshable(Protocol):
    """Declares a roster that can be read at once; ``cluster.membership.PolledRoster`` can."""

    async def refresh(self) -> object:
        """Reads the membership now, instead of at the next poll."""


class CoreDependencies(msgspec.Struct, frozen=True):
    """Holds what the core gets from its process.

    ``index`` None: no prefix hints are looked up. ``store`` None: decision records stay in this process.
    ``record_observer`` gets decision records as requests begin and end. ``adapters`` are those that clients may
    name. ``clock`` is monotonic seconds, ``wall_clock`` Unix seconds. ``last_words`` gives, for a role and a model,
    which worker left last and why. ``role_turn`` keeps other routers from changing roles; None: there are none.
    """

    roster: RosterReader
    metrics: RouterMetrics
    router_id: str
    index: PrefixLookup | None = None
    store: DecisionStore | None = None
    observers: DispatchObservers = DispatchObservers()
    record_observer: RecordObserver | None = None
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = msgspec.field(default_factory=random.Random)
    dialer: Dialer = PLAIN
    adapters: AdapterRegistry = msgspec.field(default_factory=AdapterRegistry)
    adapter_bounds: AdapterBounds = AdapterBounds()
    wall_clock: Callable[[], float] = time.time
    last_words: LastWords = lambda role, model_id: ""
    role_turn: Callable[[], AbstractAsyncContextManager[ExclusiveTurn]] | None = None


class RouterCore(msgspec.Struct, frozen=True):
    """Holds the parts of a running core.

    ``dispatcher`` opens requests, ``view`` knows the cluster, ``decisions`` records why requests were routed as
    they were, ``roles`` and ``adapters`` change workers' roles and adapters; ``links`` has the connections to
    workers.
    """

    dispatcher: Dispatcher
    view: ClusterView
    roles: RoleControl
    decisions: DecisionLog
    adapters: AdapterControl
    links: LinkTable


@asynccontextmanager
async def running_core(
    config: CoreConfig, given: CoreDependencies, settings: DispatchSettings = DispatchSettings()
) -> AsyncIterator[RouterCore]:
    """Runs a core while the block runs; at its end cancels the requests in flight and closes every link.

    Raises ConfigError for an unknown policy or bad classes.
    """
    clock, metrics = given.clock, given.metrics
    policy, classes = load_policy(config.policy), ContextClasses(config.context_classes)
    throttle, sessions = Throttle(clock), SessionHomes()
    admission = Admission(config.max_queue, clock, throttle, config.max_inflight_bytes)
    revision = ClusterRevision(admission.wake)
    links = LinkTable(given.router_id, revision.advance, given.rng, settings.stall_s, given.dialer)
    view_settings = ViewSettings(local_max_tokens=config.local_prefill_max_tokens)
    loads = AdapterLoads(given.adapters, clock, metrics, revision.advance)
    view = ClusterView(given.roster, links, revision, clock, view_settings, throttle, loads.wait_s)
    decisions = DecisionLog(given.router_id, clock, given.store, observer=given.record_observer)
    hints = PrefixHints(given.index, CircuitBreaker(clock=clock), metrics.enabled)
    readable = given.adapters.is_readable
    placer = Placer(view, hints, policy, clock, settings.worker_wait_s, sessions, readable, given.last_words)
    blame = Blame(view, metrics, settings.max_attempts, settings.full_wait_s)
    runner = ChoiceRunner(links, placer, blame, metrics, clock, loads, settings)
    counts = AdapterCounts(metrics, given.adapters.served)
    ended: tuple[EndObserver, ...] = (
        partial(_measure, throttle, view), sessions.served, counts.ended, *given.observers.ended
    )  # fmt: skip
    observers = DispatchObservers(ended, given.observers.refused)
    dispatcher = Dispatcher(view, admission, classes, decisions, runner, observers)
    roles = RoleControl(links, view, clock, partial(_look, given.roster, view), given.role_turn)
    adapters = AdapterControl(given.adapters, loads, links, given.wall_clock, given.adapter_bounds)
    keeper = AdapterKeeper(given.adapters, loads, links, dispatcher.adapters_in_use)
    for role in ("prefill", "decode"):
        metrics.workers.labels(role).set_function(partial(view.reachable, role))
    following = [
        lasting(view.run, "cluster view"),
        lasting(decisions.run, "decision records"),
        lasting(given.adapters.run, "adapters"),
        lasting(keeper.run, "adapters of workers"),
    ]
    try:
        yield RouterCore(dispatcher, view, roles, decisions, adapters, links)
    finally:
        await dispatcher.close()
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await loads.close()
        await decisions.flush()
        await links.close()


async def _look(roster: RosterReader, view: ClusterView) -> None:
    """Takes the membership as it is now."""
    if isinstance(roster, Refreshable):
        await roster.refresh()
    view.refresh()


def _measure(throttle: Throttle, view: ClusterView, request: RouterRequest, summary: ChoiceSummary) -> None:
    """Tells the throttle an answer's figures. A further choice waits for the first one's prompt, which is no
    worker's pace.
    """
    stations = summary.stations
    if "ttft" in stations and summary.finish_reason:
        tpot = stations.get("decode", 0.0) / max(1, summary.completion_tokens - 1)
        most = view.sequences(summary.decode_worker)
        service = None if summary.choice else stations["ttft"] - stations.get("queue", 0.0)
        throttle.answered(request.model_id, summary.context_class, service, tpot, request.context.slo_tpot_s, most)
