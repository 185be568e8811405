"""``[redis]``, ``[ray]`` and ``[telemetry]``: the services that a cluster uses.

Knows nothing of who runs them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from baton.cluster.sections.base import Section


class RedisConfig(Section):
    """Configures Redis; an empty ``url`` starts a private server. ``beat_s`` and ``lease_s`` are of workers'
    membership, in seconds.

    ``username`` and ``password`` (ACL), ``ca``, ``cert`` and ``key`` (rediss://) are put into ``url``.
    """

    url: str = Field(default="", description="redis://, rediss:// or unix://; empty starts a private one")
    username: str = Field(default="", description="of an ACL user")
    password: str = Field(default="", description="better from the environment: BATON_REDIS__PASSWORD")
    ca: str = Field(default="", description="file of the CA that Redis's certificate is of (rediss://)")
    cert: str = Field(default="", description="our certificate for Redis; empty shows none")
    key: str = Field(default="", description="its key")
    beat_s: float = Field(default=0.5, gt=0, description="between two heartbeats of a worker")
    lease_s: float = Field(default=5.0, gt=0, description="a worker that is not heard for so long is forgotten")


class RayConfig(Section):
    """Configures Ray; an empty ``address`` starts a private one. ``auth_mode`` must be the same on every node."""

    address: str = Field(default="", description="HOST:PORT of a running Ray; empty starts a private one")
    auth_mode: Literal["token", "disabled"] = Field(
        default="token", description="Ray's own: the same on every node"
    )
    object_store_bytes: int = Field(
        default=80 << 20, ge=80 << 20, description="of a private Ray, which keeps nothing there"
    )
    placement: Literal["peers", "pack", "spread"] = Field(
        default="peers", description="nodes for workers: prefill near decode, few nodes, or many nodes"
    )
    cert: str = Field(default="", description="certificate of this node's Ray processes: Ray's own TLS is on then")
    key: str = Field(default="", description="its key")
    ca: str = Field(default="", description="CA of every node's certificate")


class TelemetryConfig(Section):
    """Configures metrics, logs and spans; spans go to ``otlp_endpoint`` (host:port, OTLP over gRPC), "" for
    none.
    """

    otlp_endpoint: str = Field(default="", description="host:port that takes spans (OTLP over gRPC); empty: none")
    enabled: bool = Field(default=True, description="count, for /metrics and the dashboard; false keeps nothing")
    vllm_names: bool = Field(default=False, description="show metrics under vLLM's names too")
    prefill_dollars_per_hour: float = Field(default=0.0, ge=0, description="price of a prefill worker; 0: not said")
    decode_dollars_per_hour: float = Field(default=0.0, ge=0, description="price of a decode worker; 0: not said")
    loop_stall_s: float = Field(
        default=0.25,
        ge=0,
        description="seconds that an event loop may stand still; then the log has its stack; 0: any",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="of every process")
