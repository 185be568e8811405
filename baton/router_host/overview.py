"""What a router process knows of its cluster, put together: what is behind /v1/cluster, and the workers' price.

Knows nothing of HTTP.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from baton.cluster.advice import AdviceStore
from baton.cluster.config import BatonConfig
from baton.cluster.holds import HeldRoster
from baton.cluster.served_model import model_name
from baton.cluster.telemetry import RouterMetrics
from baton.controller.advice import slos
from baton.controller.observation import Seen, fullness
from baton.protos.nouns import WorkerInfo, WorkerLoad
from baton.protos.version import product_version
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.observe.live import LiveStats
from baton.router.observe.overview import Overview, Prices
from baton.router_host.metrics import SharedMetrics

ROLES = ("prefill", "decode")


def make_overview(
    config: BatonConfig,
    router_id: str,
    roster: HeldRoster,
    live: LiveStats,
    dispatcher: Dispatcher,
    advice: AdviceStore,
    metrics: RouterMetrics,
    shared: SharedMetrics | None,
) -> Overview:
    """One per router process; ``shared`` joins it with the others of its pool."""
    prices = Prices(config.telemetry.prefill_dollars_per_hour, config.telemetry.decode_dollars_per_hour)
    for role in ROLES:
        if prices.of(role):
            metrics.price.labels(role).set_function(_price(dispatcher, prices, role))
    overview = Overview(
        roster,
        live,
        config.router.context_classes,
        router={
            "id": router_id,
            "pid": os.getpid(),
            "version": product_version(),
            "model": model_name(config, config.worker.model),
            "policy": config.router.policy,
            "processes": config.router.processes,
        },
        clock=time.monotonic,
        wall_clock=time.time,
        waiting=dispatcher.waiting,
        reachable=dispatcher.reachable,
        advice=advice,
        prices=prices,
        others=shared.others if shared else None,
        holds=lambda: roster.holds,
        departures=roster.departures,
        fullness=_fullness(config),
        actions=("drain", "eject", "rerole") if dispatcher.roles is not None else ("drain", "eject"),
    )
    if shared is not None:
        shared.live = overview.state
    return overview


def _fullness(config: BatonConfig) -> Callable[[WorkerInfo, WorkerLoad], float | None]:
    """By the controller's own measure, so that its advice and what is shown agree."""
    ttft_s, tpot_s = slos(config)
    chunk, horizon_s = config.worker.prefill_chunk_tokens, config.controller.horizon_s
    return lambda info, load: fullness(Seen(info, load), chunk, ttft_s, tpot_s, horizon_s)


def _price(dispatcher: Dispatcher, prices: Prices, role: str) -> Callable[[], float]:
    return lambda: dispatcher.reachable_in(role) * prices.of(role)
