"""Assembles what a router process knows of its cluster, for /v1/cluster, and the workers' price.

Knows nothing of HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from baton.cluster.advice import AdviceStore
from baton.cluster.config import BatonConfig
from baton.cluster.holds import RosterWithHolds
from baton.cluster.metering.telemetry import RouterMetrics
from baton.cluster.served_model import model_name
from baton.controller.advice import slos
from baton.controller.observation import ObservedWorker, fullness
from baton.protos.json import Json
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import WorkerInfo
from baton.protos.version import product_version
from baton.router.compose.core import RouterCore
from baton.router.observe.handovers import CAUSES, HandoverWatch
from baton.router.observe.live import LiveStats
from baton.router.observe.overview import Overview, Prices, RouterFacts, TrafficSources, WorkerSources
from baton.router.request.environment import Environment
from baton.router_host.metrics import SharedMetrics

ROLES = ("prefill", "decode")


def make_overview(
    config: BatonConfig,
    router_id: str,
    roster: RosterWithHolds,
    live: LiveStats,
    core: RouterCore,
    advice: AdviceStore,
    metrics: RouterMetrics,
    shared: SharedMetrics | None,
) -> Overview:
    """Returns the overview of one router process, and sets the metrics of prices and of Redis; ``shared`` adds the
    rest of its pool.
    """
    prices = Prices(config.telemetry.prefill_dollars_per_hour, config.telemetry.decode_dollars_per_hour)
    metrics.redis_away.set_function(lambda: float(not roster.connected))
    for role in ROLES:
        if prices.of(role):
            metrics.price.labels(role).set_function(_price(core, prices, role))
    router: Json = {
        "id": router_id,
        "pid": os.getpid(),
        "version": product_version(),
        "model": model_name(config, config.worker.model),
        "policy": config.router.policy,
        "processes": config.router.processes,
    }
    return Overview(
        WorkerSources(
            roster,
            core.view.reachable_incarnations,
            holds=lambda: roster.holds,
            departures=roster.departures,
            fullness=_fullness(config),
            adapters=core.adapters.registry.served,
            redis_away_s=lambda: roster.away_s,
        ),
        TrafficSources(live, core.dispatcher.waiting, shared.others if shared else None),
        RouterFacts(router, tuple(config.router.context_classes), prices, ("drain", "eject", "rerole")),
        Environment(),
        advice,
    )


def watch_handovers(roster: RosterWithHolds, metrics: RouterMetrics) -> AbstractAsyncContextManager[None]:
    """Returns a context in which workers that can't hand over to one another are counted and warned of."""
    watch = HandoverWatch(roster)
    for cause in CAUSES:
        metrics.handover_obstacles.labels(cause).set_function(partial(watch.count, cause))
    return watch.running()


def _fullness(config: BatonConfig) -> Callable[[WorkerInfo, WorkerLoad], float | None]:
    """Returns the fullness by the controller's own measure, so that its advice and what is shown agree."""
    ttft_s, tpot_s = slos(config)
    chunk, horizon_s = config.worker.prefill_chunk_tokens, config.controller.horizon_s
    return lambda info, load: fullness(ObservedWorker(info, load), chunk, ttft_s, tpot_s, horizon_s)


def _price(core: RouterCore, prices: Prices, role: str) -> Callable[[], float]:
    return lambda: core.view.reachable(role) * prices.of(role)
