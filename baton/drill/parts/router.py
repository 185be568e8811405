"""A simulated router process: roster, holds, index, records and dispatch, joined by ``router_host.compose``.

Knows nothing of clients. A router that dies is started again, without its requests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import cast

import msgspec
from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from starlette.types import ASGIApp

from baton.cluster.adapters import AdapterStore
from baton.cluster.advice import AdviceStore
from baton.cluster.batch_store import BatchStore
from baton.cluster.config import BatonConfig
from baton.cluster.departures import Departure, Departures
from baton.cluster.holds import HoldStore, RosterWithHolds
from baton.cluster.membership import PolledRoster, connect
from baton.cluster.metering.telemetry import RouterMetrics
from baton.cluster.prefix_index import PrefixIndex
from baton.cluster.prefix_pins import PrefixPinStore
from baton.cluster.roles import RoleTurn, RoleTurns
from baton.cluster.sections.router import DEFAULT_CLASSES, ContextClassSection, RouterConfig
from baton.cluster.store.buckets import RateBuckets
from baton.cluster.store.patience import CircuitBreaker
from baton.cluster.store.records import RecordStore
from baton.cluster.traffic import TrafficStore
from baton.controller.loop import controlling
from baton.drill.checks.placements import PlacementWitness
from baton.drill.checks.watch import Violated
from baton.drill.language.grammar import SimulatedCheck
from baton.drill.language.vocabulary import simulated_text
from baton.drill.machines.clock import MachineClock
from baton.drill.machines.network import Network
from baton.drill.machines.process import Process
from baton.drill.parts.grpc_calls import Numbering
from baton.drill.parts.http import NumberingEnvironment
from baton.drill.parts.life import BEAT_S, EPOCH_S, HANG_UP_S, NAMESPACE
from baton.drill.parts.slot import Tell
from baton.drill.redis.server import URL, connections
from baton.drill.rpc.client import SimulatedDialer
from baton.drill.rpc.server import Server
from baton.drill.scenario import Phase, Scenario
from baton.protos.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from baton.protos.v1.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from baton.router.access.gate import AccessGate
from baton.router.access.keys import KeyRing
from baton.router.adapters.registry import AdapterRegistry
from baton.router.answer.grammar_check import GrammarCheck
from baton.router.answer.metering import NoMetering
from baton.router.answer.quotas import Quotas
from baton.router.answer.service import GenerationService
from baton.router.api.access import AccessInterceptor, AccessMiddleware
from baton.router.api.anthropic.routes import messages_routes
from baton.router.api.app import app_of
from baton.router.api.batch.lane import BatchLane
from baton.router.api.batch.routes import batch_routes
from baton.router.api.grpc.service import InferenceService
from baton.router.api.limits import BodiesInFlight
from baton.router.api.open_inference.grpc import OpenInferenceService
from baton.router.api.open_inference.rest import open_inference_routes
from baton.router.api.openai.embeddings import embeddings_routes
from baton.router.api.openai.routes import openai_routes
from baton.router.api.operator.cluster import cluster_routes
from baton.router.api.operator.prefixes import prefix_routes
from baton.router.api.operator.roles import roles_routes
from baton.router.api.rerank import rerank_routes
from baton.router.api.responses.routes import responses_routes
from baton.router.api.surfaces import (
    AccessDependencies,
    BatchSurface,
    ClusterSurface,
    PrefixSurface,
    RoleSurface,
)
from baton.router.compose.core import CoreDependencies, RouterCore, running_core
from baton.router.compose.surfaces import make_generation
from baton.router.dispatch.dispatcher import DispatchObservers
from baton.router.dispatch.prefix_control import PrefixControl
from baton.router.dispatch.runner import DispatchSettings
from baton.router.observe.traffic import TrafficMeter
from baton.router.request.context_class import ContextClasses
from baton.router.text.catalog import ModelCatalog
from baton.router_host.compose import pushing_traffic

RESTART_S = 1.0  # seconds after which a router that died serves again


@cache
def controlled(prefill: int, decode: int, most_workers: int) -> BatonConfig:
    """Returns the configuration of a cluster whose controller decides every second, and readily changes workers'
    roles. It adds some up to ``most_workers`` (0: none), and removes some.
    """
    eager = {
        "mode": "auto", "interval_s": 1.0, "window_s": 5.0, "ttft_s": 0.2, "tpot_s": 0.02, "high": 0.2, "low": 0.1,
        "least_gain": 0.0, "confirm": 1, "cooldown_s": 2.0, "horizon_s": 10.0, "error_bound": 100.0, "dial_s": 0.0,
    }  # fmt: skip
    added = {
        "most_workers": most_workers, "scale_confirm": 1, "scale_down_looks": 3, "scale_cooldown_s": 2.0,
        "payback_s": 4.0, "start_s": 1.0,
    }  # fmt: skip
    cluster = {"namespace": NAMESPACE, "prefill": prefill, "decode": decode, "start_timeout_s": 10.0}
    return BatonConfig.model_validate({"controller": eager | added, "cluster": cluster})


class RouterParts(msgspec.Struct, frozen=True):
    """The parts of a running router that clients and faults use."""

    core: RouterCore
    holds: HoldStore
    gate: AccessGate
    catalog: ModelCatalog
    app: ASGIApp  # the generating endpoints, over HTTP


class LastRead(Departures):
    """The departures of a router's cluster, which it reads as the last part of a look: it tells ``looks`` so."""

    def __init__(self, redis: Redis, wall_clock: Callable[[], float], looks: Callable[[], None]) -> None:
        super().__init__(redis, NAMESPACE, wall_clock)
        self._looks = looks

    async def recent(self) -> tuple[Departure, ...]:
        """Returns the departures of the last hour, newest first."""
        self._looks()
        return await super().recent()


class SimulatedRouter:
    """Runs a router named ``name`` and restarts it when it dies. ``parts`` is None while none runs.

    ``keys`` is the file of API keys, None where none are asked for. ``reached`` is told the name as the router
    begins its turn to change roles ("turning"), and as it looks there who has which role ("counting").
    """

    def __init__(
        self,
        name: str,
        scenario: Scenario,
        network: Network,
        violated: Violated,
        tell: Tell,
        keys: Path | None = None,
        reached: Callable[[str, Phase], None] = lambda name, phase: None,
    ) -> None:
        self.name, self._keys, self._reached = name, keys, reached
        self._has_turn = False
        self.parts: RouterParts | None = None
        self._scenario, self._network, self._violated, self._tell = scenario, network, violated, tell
        self._rng = random.Random(f"{scenario.seed} {name}")
        self._lives = itertools.count(1)
        self._held_back_until = self.wall_ahead_s = 0.0
        self._living: asyncio.Task[None] | None = None
        self.clock = MachineClock()
        self.process = Process(f"{name}#0")
        self.died = asyncio.Event()
        self._closing = asyncio.Event()

    def start(self) -> None:
        """Starts the router; from now on a dead one is followed by the next."""
        self._living = asyncio.ensure_future(self._live())

    async def close(self) -> None:
        """Shuts the router down in order, and starts no other."""
        self._closing.set()
        if self._living is not None:
            await self._living

    def kill(self, held_back_s: float) -> None:
        """Ends the process abruptly; the next one starts ``held_back_s`` seconds later than usual."""
        self._held_back_until = asyncio.get_running_loop().time() + held_back_s
        self._network.process_died(self.process.name)
        self.process.kill()

    def unrest(self, ready: Sequence[str]) -> Iterator[str]:
        """Yields what is still held, and whom the router sees ready instead of the workers ``ready``."""
        if self.parts is None:
            yield f"nobody serves {self.name}"
            return
        core = self.parts.core
        if len(core.dispatcher):
            yield f"{self.name} has {len(core.dispatcher)} choices open"
        if queued := core.dispatcher.queued():
            yield f"{self.name} has {queued} requests queued"
        if held := core.dispatcher.held_bytes:
            yield f"{self.name} holds {held} bytes of requests"
        if retired := sorted(core.adapters.registry.retired()):
            yield f"{self.name} still has {retired} to unload"
        if counts := core.view.local_counts():
            yield f"{self.name} counts {counts}"
        seen = sorted(info.worker_id for info in core.roles.workers() if info.state == "ready")
        if seen != ready:
            yield f"{self.name} sees {seen} ready, and {ready} are"

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closing.is_set():
            self.process = Process(f"{self.name}#{next(self._lives)}", self.clock)
            self.died = asyncio.Event()
            task = self.process.spawn(self._run(), "parts")
            await asyncio.wait({task})
            self.parts = None
            self.died.set()
            if task.cancelled():
                self._tell(self.name, "died")
                await asyncio.sleep(RESTART_S + max(0.0, self._held_back_until - loop.time()))
            elif task.exception() is not None:
                self._violated(f"{self.process.name} failed: {task.exception()!r}")
                return

    async def _run(self) -> None:
        async with self._composed() as self.parts:
            self._tell(self.name, f"serves as {self.process.name}")
            await self._closing.wait()

    @asynccontextmanager
    async def _composed(self) -> AsyncIterator[RouterParts]:
        clock, own = self.clock.now, self._scenario

        def wall_clock() -> float:
            return EPOCH_S + clock() + self.wall_ahead_s

        config = RouterConfig(
            policy=own.policy,
            local_prefill_max_tokens=own.local_max,
            max_queue=own.max_queue,
            context_classes=_classes(own.short_tokens),
        ).model_copy(update={"max_inflight_bytes": own.max_inflight_bytes})  # less than a router may have
        redis = connect(URL, connections(self._network, self.process.name))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(redis.aclose)
            meter = TrafficMeter(self.process.name, wall_clock) if own.controller else None
            process = self.process
            placements = PlacementWitness(self._violated, meter, own.loses_nobody, lambda: process.alive)
            joined = await stack.enter_async_context(
                PolledRoster(redis, NAMESPACE, BEAT_S, clock=clock, wall_clock=wall_clock)
            )
            holds = HoldStore(redis, NAMESPACE)
            roster = await stack.enter_async_context(
                RosterWithHolds(joined, holds, BEAT_S, departures=LastRead(redis, wall_clock, self._looks))
            )
            adapters = AdapterRegistry((), AdapterStore(redis, NAMESPACE) if own.adapters else None, clock)
            await adapters.begin()
            ring = None if self._keys is None else KeyRing(self._keys, clock)
            gate = AccessGate(ring, clock, RateBuckets(redis, NAMESPACE, CircuitBreaker(clock=clock)))
            given = CoreDependencies(
                roster=roster,
                metrics=RouterMetrics(CollectorRegistry()),
                router_id=self.process.name,
                index=PrefixIndex(redis, NAMESPACE),
                store=RecordStore(redis, NAMESPACE, clock=clock),
                record_observer=placements,
                observers=DispatchObservers((placements.ended,)),
                clock=clock,
                rng=self._rng,
                dialer=SimulatedDialer(self._network, self.process.name),
                adapters=adapters,
                wall_clock=wall_clock,
                last_words=roster.last_words,
                role_turn=partial(self._role_turn, RoleTurns(redis, NAMESPACE, self.process.name)),
            )
            settings = DispatchSettings(hedge_factor=own.hedge)
            core = await stack.enter_async_context(running_core(config, given, settings))
            await stack.enter_async_context(gate.settling())
            catalog = ModelCatalog(core.dispatcher.models, {}, wall_clock, adapters, simulated_text)
            service = self._generation(config, given, core, gate, catalog)
            batches = BatchStore(redis, NAMESPACE, clock=clock)
            if own.batches:
                lane = BatchLane(service, batches, given.router_id, core.dispatcher.spare)
                await stack.enter_async_context(lane.running())
            if own.controller:
                await stack.enter_async_context(
                    pushing_traffic(meter, TrafficStore(redis, NAMESPACE), core.decisions)
                )
                advice, set_up = (
                    AdviceStore(redis, NAMESPACE),
                    controlled(own.prefill, own.decode, own.most_workers),
                )
                await stack.enter_async_context(
                    controlling(
                        set_up, redis, given.router_id, core.roles, roster, advice, given.metrics, wall_clock
                    )
                )
            operated: tuple[APIRouter, ...] = ()
            if any(fault.over_rest for fault in own.faults):
                most, store = service.limits.max_body_bytes, AdviceStore(redis, NAMESPACE, own.controller)
                operated = (
                    roles_routes(RoleSurface(core.roles, store, wall_clock, most)),
                    cluster_routes(ClusterSurface(None, roster, wall_clock, most, gate)),
                )
            pins = PrefixPinStore(redis, NAMESPACE)
            prefixes = PrefixControl(
                core.links, pins, config.max_pinned_tokens, wall_clock, service.environment.new_id
            )
            await stack.enter_async_context(self._over_grpc(service))
            yield RouterParts(core, holds, gate, catalog, _app(service, prefixes, batches, *operated))

    @asynccontextmanager
    async def _role_turn(self, turns: RoleTurns) -> AsyncIterator[RoleTurn]:
        """Has the turn to change roles while entered, and says so."""
        async with turns.turn() as turn:
            self._reached(self.name, "turning")
            self._has_turn = True
            try:
                yield turn
            finally:
                self._has_turn = False

    def _looks(self) -> None:
        if self._has_turn:
            self._reached(self.name, "counting")

    @asynccontextmanager
    async def _over_grpc(self, service: GenerationService) -> AsyncIterator[None]:
        """Serves the gRPC service while entered."""
        server = Server(self.process.spawn, (Numbering(), AccessInterceptor(_access(service))))
        add_InferenceServicer_to_server(InferenceService(service), server)
        add_GRPCInferenceServiceServicer_to_server(OpenInferenceService(service), server)
        address = f"{self.name}:8001"
        self._network.listen(address, self.process.name, server)
        try:
            yield
        finally:
            self._network.unlisten(address)
            await server.stop(HANG_UP_S)
            self._network.hang_up(server)

    def _generation(
        self,
        config: RouterConfig,
        given: CoreDependencies,
        core: RouterCore,
        gate: AccessGate,
        catalog: ModelCatalog,
    ) -> GenerationService:
        """Returns the API's own generation service, over the simulated model's text."""
        environment = NumberingEnvironment(given.clock, given.wall_clock, self._rng.randbytes)
        quotas = Quotas(gate, given.metrics, core.decisions, ContextClasses(config.context_classes))
        made = make_generation(config, core.dispatcher, catalog, quotas, NoMetering(), environment)
        return msgspec.structs.replace(made, grammars=cast(GrammarCheck, SimulatedCheck(self._rng)))


def _classes(short_tokens: int) -> tuple[ContextClassSection, ...]:
    """Returns the context classes: the usual ones, or two that part at ``short_tokens`` prompt tokens."""
    if not short_tokens:
        return DEFAULT_CLASSES
    return ContextClassSection(name="short", max_tokens=short_tokens), ContextClassSection(
        name="long", max_tokens=0
    )


def _app(service: GenerationService, prefixes: PrefixControl, batches: BatchStore, *operated: APIRouter) -> ASGIApp:
    most = service.limits.max_body_bytes
    app = app_of(
        openai_routes(service),
        embeddings_routes(service),
        messages_routes(service),
        open_inference_routes(service),
        rerank_routes(service),
        prefix_routes(PrefixSurface(prefixes), service),
        responses_routes(service),
        batch_routes(BatchSurface(batches, service.environment, most, most, service.catalog.model_of)),
        *operated,
    )
    return AccessMiddleware(app, _access(service))


def _access(service: GenerationService) -> AccessDependencies:
    quotas, bodies = service.quotas, BodiesInFlight(service.limits.max_inflight_bytes)
    return AccessDependencies(quotas.gate, quotas.metrics, service.environment, bodies)
