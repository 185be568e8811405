"""The surfaces of a router whose dispatch is given, as ``router_host.compose`` makes them for a whole one."""

from __future__ import annotations

import os
import time

from prometheus_client import CollectorRegistry

from baton.cluster.batch_store import BatchStore
from baton.cluster.config import RouterConfig
from baton.cluster.metering.telemetry import RouterMetrics
from baton.router.access.gate import AccessGate
from baton.router.answer.quotas import Quotas
from baton.router.answer.service import GenerationService
from baton.router.api.surfaces import BatchSurface, ClusterSurface, Surfaces, registry_exposition
from baton.router.compose.surfaces import make_generation, make_metering
from baton.router.observe.decisions import DecisionLog
from baton.router.observe.live import LiveStats
from baton.router.request.context_class import ContextClasses
from baton.router.request.environment import Environment
from baton.router.request.request import ServingBackend
from baton.router.text.catalog import ModelCatalog


def generation_of(
    config: RouterConfig,
    serving: ServingBackend,
    catalog: ModelCatalog,
    gate: AccessGate | None = None,
    decisions: DecisionLog | None = None,
    metrics: RouterMetrics | None = None,
    live: LiveStats | None = None,
) -> GenerationService:
    metrics = metrics or RouterMetrics(CollectorRegistry())
    environment = Environment(time.monotonic, time.time, os.urandom)
    decisions = DecisionLog("r", time.monotonic) if decisions is None else decisions
    quotas = Quotas(gate or AccessGate(), metrics, decisions, ContextClasses(config.context_classes))
    metering = make_metering(config, metrics, live, environment)
    return make_generation(config, serving, catalog, quotas, metering, environment)


def surfaces_of(config: RouterConfig, generation: GenerationService, batches: BatchStore | None = None) -> Surfaces:
    """A router's that belongs to no cluster: nothing to hold, no roles to change."""
    environment, most = generation.environment, config.max_body_bytes
    return Surfaces(
        generation,
        registry_exposition(generation.quotas.metrics.registry),
        BatchSurface(batches, environment, most, config.max_stored_bytes, generation.catalog.model_of),
        ClusterSurface(None, None, environment.wall_clock, most, generation.quotas.gate),
    )
