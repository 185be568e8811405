"""Parameter objects of the router's API surfaces: what each needs from the rest of the router.

Knows nothing of sockets or how the parts are made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from baton.cluster.advice import AdviceStore
from baton.cluster.batch_store import BatchStore
from baton.cluster.holds import RosterWithHolds
from baton.cluster.metering.telemetry import RouterMetrics
from baton.router.access.gate import AccessGate
from baton.router.answer.service import GenerationService
from baton.router.api.limits import BodiesInFlight
from baton.router.dispatch.adapters.control import AdapterControl
from baton.router.dispatch.prefix_control import PrefixControl
from baton.router.dispatch.role_control import RoleControl
from baton.router.observe.overview import Overview
from baton.router.request.environment import Environment

Exposition = Callable[[str], Awaitable[tuple[bytes, str]]]  # of an Accept header: the metrics, and their media type


class AccessDependencies(msgspec.Struct, frozen=True):
    """Holds what the borders of REST and gRPC need: the gate that checks keys, the metrics of refusals, the
    environment, and the count of bodies in flight, which they share.
    """

    gate: AccessGate
    metrics: RouterMetrics
    environment: Environment
    bodies: BodiesInFlight


class BatchSurface(msgspec.Struct, frozen=True):
    """Holds what ``/v1/files`` and ``/v1/batches`` need.

    ``store`` is None where the router has no Redis. Limits in bytes. ``model_of`` gives the base model that a name
    stands for, "" for an unknown one.
    """

    store: BatchStore | None
    environment: Environment
    max_body_bytes: int
    max_stored_bytes: int
    model_of: Callable[[str], str] = lambda name: ""


class RoleSurface(msgspec.Struct, frozen=True):
    """Holds what the endpoints of roles and the ratio need: what changes workers' roles, and the store of pins and
    advice.
    """

    control: RoleControl
    store: AdviceStore
    wall_clock: Callable[[], float]
    max_body_bytes: int


class AdapterSurface(msgspec.Struct, frozen=True):
    """Holds what the endpoints that load and unload adapters need.

    ``off`` says why nobody may change adapters; "" if operators may.
    """

    control: AdapterControl
    max_body_bytes: int
    off: str = ""


class PrefixSurface(msgspec.Struct, frozen=True):
    """Holds what the endpoints of pinned prefixes need."""

    control: PrefixControl


class ClusterSurface(msgspec.Struct, frozen=True):
    """Holds what the endpoints of ``/v1/cluster`` need. ``overview`` is None without telemetry.

    ``roster`` is None for a router that is not part of a cluster whose workers can be held. ``gate`` tells whether
    the key of a stream's caller is still an admin's.
    """

    overview: Overview | None
    roster: RosterWithHolds | None
    wall_clock: Callable[[], float]
    max_body_bytes: int
    gate: AccessGate


class Surfaces(msgspec.Struct, frozen=True, dict=True):
    """Holds the parts of every API surface of a router; ``roles``, ``adapters`` and ``prefixes`` are None if it
    belongs to no cluster.
    """

    generation: GenerationService
    exposition: Exposition
    batch: BatchSurface
    cluster: ClusterSurface
    roles: RoleSurface | None = None
    adapters: AdapterSurface | None = None
    prefixes: PrefixSurface | None = None

    @cached_property
    def access(self) -> AccessDependencies:
        """Returns what the REST and gRPC borders need, the same each time."""
        quotas, bodies = self.generation.quotas, BodiesInFlight(self.generation.limits.max_inflight_bytes)
        return AccessDependencies(quotas.gate, quotas.metrics, self.generation.environment, bodies)


def registry_exposition(registry: CollectorRegistry) -> Exposition:
    """Returns a function of an Accept header that gives ``registry``'s metrics and their media type: Prometheus'
    text, or OpenMetrics if accepted.
    """

    async def exposition(accept: str) -> tuple[bytes, str]:
        encode, media_type = choose_encoder(accept)
        return encode(registry), media_type

    return exposition
