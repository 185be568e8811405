"""Assembles one router process (roster, dispatch, models and what the API surfaces need) and runs it.

Knows nothing of sockets or signals.

    Redis ──▶ roster ──▶ core (dispatch) ──▶ surfaces (REST, gRPC)
                │          │ decisions          ▲
                │          └──▶ traffic, controller, batch lane
                └──▶ overview ◀── live figures ◀── metering
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from baton.cluster.adapters import BY_CONFIG, AdapterEntry, AdapterStore
from baton.cluster.advice import AdviceStore
from baton.cluster.batch_store import BatchStore
from baton.cluster.config import LOOPBACK, BatonConfig
from baton.cluster.departures import Departures
from baton.cluster.holds import HoldStore, RosterWithHolds
from baton.cluster.membership import PolledRoster
from baton.cluster.metering.telemetry import RouterMetrics
from baton.cluster.prefix_index import PrefixIndex
from baton.cluster.prefix_pins import PrefixPinStore
from baton.cluster.roles import RoleTurns
from baton.cluster.served_model import is_paced, model_name, text_directory
from baton.cluster.store.buckets import RateBuckets
from baton.cluster.store.records import RecordStore
from baton.cluster.traffic import TrafficStore
from baton.controller.loop import controlling
from baton.process.security import router_dialer
from baton.router.access.gate import AccessGate
from baton.router.access.keys import KeyRing
from baton.router.adapters.registry import AdapterRegistry
from baton.router.answer.quotas import Quotas
from baton.router.api.batch.lane import BatchLane
from baton.router.api.surfaces import (
    AdapterSurface,
    BatchSurface,
    ClusterSurface,
    PrefixSurface,
    RoleSurface,
    Surfaces,
    registry_exposition,
)
from baton.router.compose.core import CoreDependencies, RouterCore, running_core
from baton.router.compose.surfaces import make_generation, make_metering
from baton.router.dispatch.adapters.control import AdapterBounds
from baton.router.dispatch.dispatcher import DispatchObservers
from baton.router.dispatch.prefix_control import PrefixControl
from baton.router.dispatch.runner import DispatchSettings
from baton.router.observe.decisions import DecisionLog
from baton.router.observe.live import LiveStats
from baton.router.observe.tallies import count_refusal
from baton.router.observe.traffic import TrafficMeter
from baton.router.request.context_class import ContextClasses
from baton.router.request.environment import Environment
from baton.router.request.request import ChoiceSummary, RouterRequest
from baton.router.text.catalog import ModelCatalog
from baton.router_host.metrics import SharedMetrics
from baton.router_host.overview import make_overview, watch_handovers
from baton.tasks.beside import beside


class RouterIdentity(msgspec.Struct, frozen=True):
    """Identifies a router process: its router's id, and its ``index`` in a pool whose files lie in ``folder``.

    ``index`` -1: it is the only process of its router.
    """

    router_id: str
    folder: Path
    index: int = -1


@asynccontextmanager
async def running_parts(
    config: BatonConfig, identity: RouterIdentity, redis: Redis, registry: CollectorRegistry, metrics: RouterMetrics
) -> AsyncIterator[Surfaces]:
    """While entered, runs everything of a router but its listeners; yields what they serve. Raises ConfigError."""
    seed, namespace = config.worker.seed, config.cluster.namespace
    rng = random.Random(f"{seed}/{identity.index}") if seed else random.SystemRandom()
    environment = Environment(entropy=rng.randbytes)
    live = LiveStats(environment.clock, metrics.asked.now) if config.telemetry.enabled else None
    gate = make_gate(config, redis, environment)
    meter = None if config.controller.mode == "off" else TrafficMeter(identity.router_id, environment.wall_clock)
    advice = AdviceStore(redis, namespace, config.controller.mode != "off")
    batches = BatchStore(redis, namespace)
    adapters = AdapterRegistry(configured_adapters(config), AdapterStore(redis, namespace), environment.clock)
    await adapters.begin()
    async with AsyncExitStack() as parts:
        joined = await parts.enter_async_context(PolledRoster(redis, namespace))
        held = RosterWithHolds(joined, HoldStore(redis, namespace), departures=Departures(redis, namespace))
        roster = await parts.enter_async_context(held)
        given = CoreDependencies(
            roster=roster,
            metrics=metrics,
            router_id=identity.router_id,
            index=PrefixIndex(redis, namespace),
            store=RecordStore(redis, namespace),
            observers=DispatchObservers((partial(_spend, gate),), (partial(count_refusal, metrics, live),)),
            record_observer=meter,
            clock=environment.clock,
            rng=rng,
            dialer=router_dialer(config),
            adapters=adapters,
            adapter_bounds=AdapterBounds(config.adapters.max_served, config.adapters.max_per_tenant),
            wall_clock=environment.wall_clock,
            last_words=roster.last_words,
            role_turn=RoleTurns(redis, namespace, identity.router_id).turn,
        )
        settings = DispatchSettings(hedge_factor=config.router.hedge_prefill, stall_s=config.router.stall_s)
        core = await parts.enter_async_context(running_core(config.router, given, settings))
        await parts.enter_async_context(gate.settling())
        await parts.enter_async_context(watch_handovers(roster, metrics))
        shared = make_shared(config, identity, registry, live, core)
        await parts.enter_async_context(shared.serving() if shared else nullcontext())
        overview = None
        if live is not None:
            overview = make_overview(config, identity.router_id, roster, live, core, advice, metrics, shared)
        quotas = Quotas(gate, metrics, core.decisions, ContextClasses(config.router.context_classes))
        metering = make_metering(config.router, metrics, live, environment)
        catalog = make_catalog(config, core, environment, adapters)
        generation = make_generation(config.router, core.dispatcher, catalog, quotas, metering, environment)
        generation.grammars.warm()
        lane = BatchLane(generation, batches, identity.router_id, core.dispatcher.spare)
        await parts.enter_async_context(lane.running())
        await parts.enter_async_context(pushing_traffic(meter, TrafficStore(redis, namespace), core.decisions))
        await parts.enter_async_context(
            controlling(config, redis, identity.router_id, core.roles, roster, advice, metrics)
        )
        most, wall_clock = config.router.max_body_bytes, environment.wall_clock
        pins = PrefixPinStore(redis, namespace)
        prefixes = PrefixControl(core.links, pins, config.router.max_pinned_tokens, wall_clock, environment.new_id)
        yield Surfaces(
            generation,
            shared.exposition if shared else registry_exposition(registry),
            BatchSurface(batches, environment, most, config.router.max_stored_bytes, catalog.model_of),
            ClusterSurface(overview, roster, environment.wall_clock, most, gate),
            RoleSurface(core.roles, advice, environment.wall_clock, most),
            AdapterSurface(core.adapters, most, loading_off(config)),
            PrefixSurface(prefixes),
        )


def make_gate(config: BatonConfig, redis: Redis, environment: Environment) -> AccessGate:
    """Returns the gate that checks API keys and rates, which is open if no ``router.keys_file`` is set.

    Raises ConfigError.
    """
    if not config.router.keys_file:
        return AccessGate()
    keys = KeyRing(Path(config.router.keys_file), environment.clock)
    return AccessGate(keys, environment.clock, RateBuckets(redis, config.cluster.namespace))


def make_shared(
    config: BatonConfig,
    identity: RouterIdentity,
    registry: CollectorRegistry,
    live: LiveStats | None,
    core: RouterCore,
) -> SharedMetrics | None:
    """Returns what merges the metrics of a pool's processes; None for a router of one process."""
    if identity.index < 0:
        return None
    state = None if live is None else lambda: live.state(core.dispatcher.waiting())
    return SharedMetrics(registry, identity.folder, identity.index, config.router.processes, state)


def configured_adapters(config: BatonConfig) -> list[AdapterEntry]:
    """Returns the adapters that every worker loads at its start, by the config."""
    name = model_name(config, config.worker.model)
    return [AdapterEntry(k, name, path, by=BY_CONFIG) for k, path in config.worker.adapters.items()]


def loading_off(config: BatonConfig) -> str:
    """Returns why operators can't load adapters over the API; "" if they can."""
    if not config.adapters.root or not config.adapters.max_loaded:
        return "adapters.root is not set, so none can be loaded while serving"
    if config.router.host not in LOOPBACK and not config.router.keys_file:
        return f"router.host {config.router.host} can be reached from outside and asks nobody for a key"
    return ""


def make_catalog(
    config: BatonConfig, core: RouterCore, environment: Environment, adapters: AdapterRegistry
) -> ModelCatalog:
    """Returns the catalog of the models that workers serve; the configured model's tokenizer is read from its own
    directory.
    """
    name = model_name(config, config.worker.model)
    files = text_directory(config.worker.model, is_paced(config))
    return ModelCatalog(core.dispatcher.models, {name: files}, environment.wall_clock, adapters)


@asynccontextmanager
async def pushing_traffic(meter: TrafficMeter | None, store: TrafficStore, log: DecisionLog) -> AsyncIterator[None]:
    """While entered, pushes this router's traffic to ``store`` every second; does nothing if ``meter`` is None."""
    if meter is None:
        yield
        return
    async with beside(partial(meter.run, store.push, log), "traffic"):
        yield


def _spend(gate: AccessGate, request: RouterRequest, summary: ChoiceSummary) -> None:
    gate.spent(request.context.key, summary.completion_tokens)
