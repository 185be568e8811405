"""Puts the router's core together and runs it: links, view, queue, dispatcher. Knows nothing of REST or text."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry

from baton.cluster.telemetry import RouterMetrics
from baton.router.dispatch.admission import Admission
from baton.router.dispatch.affinity import SessionHomes
from baton.router.dispatch.dispatcher import Dispatcher, DispatchSettings
from baton.router.dispatch.placing import Placer
from baton.router.dispatch.prefix_hints import PrefixHints, PrefixLookup
from baton.router.dispatch.role_control import RoleControl
from baton.router.dispatch.throttle import Throttle
from baton.router.dispatch.view import ClusterView, ViewSettings
from baton.router.observe.decisions import DecisionLog, DecisionStore
from baton.router.observe.live import LiveStats
from baton.router.policies import load_policy
from baton.router.request.context_class import ContextClasses, ContextClassLike
from baton.router.request.request import ChoiceSummary, RouterRequest
from baton.router.workers.link_table import Connect, LinkTable, connect
from baton.router.workers.link_table import connect as plain_connect
from baton.router.workers.roster import RosterReader
from baton.tls.rpc import PLAIN, Dialer


class CoreConfig(Protocol):
    """What the core reads of the router's config; cluster.config.RouterConfig has it."""

    @property
    def policy(self) -> str:
        """A file's name in router/policies."""

    @property
    def context_classes(self) -> Iterable[ContextClassLike]:
        """In rising order."""

    @property
    def max_queue(self) -> int:
        """Requests that wait, per class."""

    @property
    def max_inflight_bytes(self) -> int:
        """Of prompts and answers held at once."""

    @property
    def local_prefill_max_tokens(self) -> int:
        """Uncached tokens up to which a decode worker reads a prompt itself."""


@runtime_checkable
class Refreshable(Protocol):
    """A roster that can be asked to look now; cluster.membership.Roster can."""

    async def refresh(self) -> object:
        """Ask, instead of waiting for the next poll."""


@asynccontextmanager
async def dispatching(
    config: CoreConfig,
    roster: RosterReader,
    index: PrefixLookup | None = None,
    store: DecisionStore | None = None,
    *,
    router_id: str = "",
    metrics: RouterMetrics | None = None,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
    connect: Connect = connect,
    dialer: Dialer = PLAIN,
    settings: DispatchSettings = DispatchSettings(),
    live: LiveStats | None = None,
) -> AsyncIterator[Dispatcher]:
    """A running Dispatcher; on leaving, what runs is cancelled and every link is closed. Raises ConfigError."""
    rng = rng or random.Random()
    metrics = metrics or RouterMetrics(CollectorRegistry())
    policy, classes = load_policy(config.policy), ContextClasses(config.context_classes)
    router_id = router_id or f"router-{rng.getrandbits(64):016x}"
    if dialer is not PLAIN:
        connect = partial(plain_connect, dialer=dialer)
    links = LinkTable(router_id, lambda: None, rng, connect, settings.stall_s, dialer)
    throttle = Throttle(clock)
    settings_of_view = ViewSettings(local_max_tokens=config.local_prefill_max_tokens)
    view = ClusterView(roster, links, clock, settings_of_view, throttle)
    admission = Admission(config.max_queue, clock, throttle, config.max_inflight_bytes)
    decisions = DecisionLog(links.router_id, clock, store)
    sessions = SessionHomes()
    hints = PrefixHints(index, keeps=metrics.enabled)
    placer = Placer(view, hints, policy, clock, settings.worker_wait_s, sessions)
    dispatcher = Dispatcher(view, links, admission, classes, placer, decisions, metrics, clock, settings)
    dispatcher.on_refused = partial(_refused, metrics, live)
    dispatcher.listeners += [partial(_tell, throttle, view), sessions.served]

    async def look() -> None:
        if isinstance(roster, Refreshable):
            await roster.refresh()
        view.refresh()

    dispatcher.roles = RoleControl(links, view, clock, look)
    for role in ("prefill", "decode"):
        metrics.workers.labels(role).set_function(partial(view.reachable, role))

    following = [
        asyncio.create_task(view.run(), name="cluster view"),
        asyncio.create_task(decisions.run(), name="cluster decisions"),
    ]
    try:
        yield dispatcher
    finally:
        await dispatcher.close()
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await decisions.flush()
        await links.close()


def _refused(metrics: RouterMetrics, live: LiveStats | None, request: RouterRequest, context_class: str) -> None:
    """One that was turned away missed its SLOs."""
    had_slo = bool(request.slo_ttft_s or request.slo_tpot_s)
    if had_slo:
        metrics.slo.labels(request.model_id, context_class, "all", "missed").inc()
    if live is not None:
        live.refused(context_class, had_slo)


def _tell(throttle: Throttle, view: ClusterView, request: RouterRequest, summary: ChoiceSummary) -> None:
    """An answer's figures, for those that steer by them."""
    seen = summary.stations
    if "ttft" in seen and summary.finish_reason:
        tpot = seen.get("decode", 0.0) / max(1, summary.completion_tokens - 1)
        most = view.sequences(summary.decode_worker)
        throttle.answered(
            summary.context_class, seen["ttft"] - seen.get("queue", 0.0), tpot, request.slo_tpot_s, most
        )
