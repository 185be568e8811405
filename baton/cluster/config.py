"""Every setting of a cluster: ``baton.toml``, then ``BATON_SECTION__KEY`` in the environment, then flags.

Knows nothing of what reads a setting, nor whether a port is free or a model exists.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, TomlConfigSettingsSource
from pydantic_settings import PydanticBaseSettingsSource as Source

from baton.cluster.redis_url import with_credentials
from baton.protos.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Section(BaseModel):
    """A frozen table of the config file; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ContextClass(Section):
    """Requests of at most ``max_tokens`` tokens (prompt), first class that fits; 0 takes the rest.

    SLOs in seconds for requests that name none themselves; 0: none. One that would miss it is refused early.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$", description="of metrics and rules")
    max_tokens: int = Field(default=0, ge=0, description="of the prompt; 0: the rest")
    slo_ttft_s: float = Field(default=0.0, ge=0, description="wanted to the first token; 0: none")
    slo_tpot_s: float = Field(default=0.0, ge=0, description="wanted between tokens, in the mean; 0: none")


DEFAULT_CLASSES = (
    ContextClass(name="short", max_tokens=1024),
    ContextClass(name="medium", max_tokens=8192),
    ContextClass(name="long", max_tokens=0),
)


class RouterConfig(Section):
    """What clients meet. Times in seconds, sizes in bytes."""

    host: str = Field(
        default="127.0.0.1",
        description="address that both ports listen on; a routable one needs keys_file, a client CA or insecure",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="of REST; 0 takes a free one")
    grpc_port: int = Field(default=8001, ge=0, le=65535, description="of gRPC; 0 takes a free one")
    insecure: bool = Field(
        default=False, description="listen on a routable address without asking anybody for a key"
    )
    keys_file: str = Field(default="", description="API keys (`baton keys add`); empty asks nobody for a key")
    processes: int = Field(default=1, ge=1, le=64, description="router processes that share the ports")
    policy: str = Field(default="cost", description="how a way is chosen: round_robin, least_loaded or cost")
    hedge_prefill: float = Field(
        default=0.0, ge=0, description="a prefill this many times overdue goes to another worker; 0: never"
    )
    stall_s: float = Field(default=5.0, gt=0, description="a worker that makes no progress for so long is left")
    context_classes: tuple[ContextClass, ...] = Field(
        default=DEFAULT_CLASSES, description="requests by prompt length, each with a queue of its own"
    )
    max_queue: int = Field(default=1024, ge=1, description="requests that wait, per context class")
    max_inflight_bytes: int = Field(default=1 << 30, ge=1 << 20, description="prompts and answers held at once")
    request_timeout_s: float = Field(
        default=600.0, gt=0, description="a request that takes longer ends with an error"
    )
    shutdown_grace_s: float = Field(
        default=2.0, ge=0, description="what runs may finish in this time when the router is told to stop"
    )
    max_body_bytes: int = Field(default=8 << 20, ge=1024, description="of one request")
    max_n: int = Field(default=16, ge=1, description="choices in one request")
    max_stop: int = Field(default=16, ge=1, description="stop strings in one request")
    max_prompts: int = Field(default=64, ge=1, description="prompts in one completion request")
    local_prefill_max_tokens: int = Field(
        default=64, ge=0, description="uncached prompt tokens up to which the decode worker runs a prompt itself"
    )
    trace_file: str = Field(default="", description="redacted trace of what was served (.jsonl); empty: none")
    trace_file_bytes: int = Field(default=64 << 20, ge=1024, description="a trace file that long is rotated")
    tool_parser: str = Field(default="auto", description="format of tool calls: auto, hermes, llama3, mistral")
    reasoning_parser: str = Field(default="auto", description="format of the model's thinking: auto, none, think")

    @model_validator(mode="after")
    def _classes_in_order(self) -> RouterConfig:
        limits = [c.max_tokens or float("inf") for c in self.context_classes]
        names = [c.name for c in self.context_classes]
        if not limits or limits != sorted(limits) or len(set(names)) != len(names):
            raise ValueError(
                "context_classes: give distinct names in rising order of max_tokens (0, the rest, last)"
            )
        return self


class WorkerConfig(Section):
    """What each worker runs. ``threads`` 0 shares the machine's cores among its workers."""

    model: str = Field(default="", description="directory or Hugging Face id; empty takes the demo model")
    model_name: str = Field(default="", description="the name clients use; empty takes the model's last path part")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of computation; auto takes the checkpoint's, float32 on a CPU"
    )
    kv_cache_dtype: Literal["auto", "float32", "bf16", "int8", "fp8"] = Field(
        default="auto", description="of stored K and V; auto: as dtype"
    )
    quantization: Literal["none", "int8", "int4"] = Field(default="none", description="of plain weights, on load")
    cache_dir: str = Field(default="", description="of packed weights; empty: $BATON_CACHE_DIR or ~/.cache/baton")
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda|paced:.+)$", description="cpu, cuda or paced:PROFILE")
    seed: int = Field(default=0, description="of what is random; 0 takes the system's entropy")
    host: str = Field(default="127.0.0.1", description="address its gRPC server binds and advertises")
    port: int = Field(default=0, ge=0, le=65535, description="of its gRPC server; 0 takes a free one")
    data_port: int = Field(
        default=0, ge=0, le=65535, description="on which a decode worker takes KV by tcp; 0 takes a free one"
    )
    metrics_port: int = Field(default=0, ge=0, le=65535, description="of its /metrics; 0 takes a free one")
    threads: int = Field(default=0, ge=0, description="of one worker; 0 shares the machine's cores")
    pages: int = Field(default=0, ge=0, description="KV pages; 0 takes kv_memory_bytes")
    kv_memory_bytes: int = Field(default=512 << 20, ge=1 << 20, description="of KV pages, per worker")
    max_model_len: int = Field(default=0, ge=0, description="0 takes the model's own")
    max_batch: int = Field(default=64, ge=1, description="sequences in one step")
    prefill_chunk_tokens: int = Field(default=512, ge=16, description="prompt tokens of one step")
    itl_target_s: float = Field(
        default=0.0, ge=0, description="seconds wanted between an answer's tokens; decode steps keep to it; 0: off"
    )
    lease_ttl_s: float = Field(default=30.0, gt=0, description="a reservation that nobody renews ends then")
    drain_grace_s: float = Field(
        default=2.0, ge=0, description="what runs may finish in this time when the worker is told to stop"
    )
    metrics: bool = Field(default=True, description="whether it answers GET /metrics")
    host_tier_bytes: int = Field(default=0, ge=0, description="host memory below the device's pages; 0: off")
    disk_tier_bytes: int = Field(default=0, ge=0, description="each worker's files below that; 0: off")
    disk_tier_dir: str = Field(default="", description="where those files lie; they survive a restart")
    kv_transport: str = Field(
        default="auto", description="how KV gets to decode workers; auto tries and measures each pair"
    )
    kv_codec: Literal["none", "int8", "fp8"] = Field(
        default="none", description="code KV for slow networks; lossy, and kept apart from exact KV in every cache"
    )


class Pool(Section):
    """Workers beside ``prefill`` and ``decode``, on hardware of their own: long prompts, another accelerator."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,31}$", description="its slots are <name>-0, <name>-1 …")
    role: Literal["prefill", "decode"] = Field(description="what its workers are")
    count: int = Field(default=1, ge=0, le=1024, description="how many")
    resources: dict[str, float] = Field(
        default={}, description="that a Ray node must have free for each; empty: one baton_<role>"
    )
    labels: dict[str, str] = Field(default={}, description="that a Ray node must carry")
    gang: int = Field(
        default=1, ge=1, le=64, description="bundles of these resources per worker, all on one node or none"
    )
    worker: dict[str, Any] = Field(default={}, description="settings of [worker] that differ here")


class ClusterConfig(Section):
    """How many workers of each role, and where a run keeps its sockets, locks and logs."""

    prefill: int = Field(default=1, ge=0, le=1024, description="prefill workers")
    decode: int = Field(default=1, ge=1, le=1024, description="decode workers")
    pools: tuple[Pool, ...] = Field(default=(), description="further workers, on hardware of their own")
    colocated: bool = Field(
        default=False, description="decode workers read their prompts themselves; no prefill workers"
    )
    namespace: str = Field(
        default="baton", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="keeps clusters apart that share a Redis"
    )
    run_dir: str = Field(default="", description="empty makes one for this run")
    start_timeout_s: float = Field(default=300.0, gt=0, description="a cluster that isn't up by then gives up")


class RedisConfig(Section):
    """``url`` empty starts a private server. Beats and leases are membership's, in seconds.

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
    """``address`` empty starts a private Ray. ``auth_mode`` must agree on every node of the cluster."""

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
    """Spans go to ``otlp_endpoint`` (host:port, OTLP over gRPC); empty turns them off."""

    otlp_endpoint: str = Field(default="", description="host:port that takes spans (OTLP over gRPC); empty: none")
    enabled: bool = Field(default=True, description="count, for /metrics and the dashboard; false keeps nothing")
    vllm_names: bool = Field(default=False, description="show metrics under vLLM's names too")
    prefill_dollars_per_hour: float = Field(default=0.0, ge=0, description="price of a prefill worker; 0: not said")
    decode_dollars_per_hour: float = Field(default=0.0, ge=0, description="price of a decode worker; 0: not said")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="of every process")


class TlsConfig(Section):
    """Certificates (PEM files): ``dir`` is a folder of `baton certs`; or name ``cert``, ``key`` and ``ca``.

    All is off when both are empty. Inside the cluster both ends show a certificate of ``ca``, and it must carry the
    name of the role: ``router.<domain>`` or ``worker.<domain>``.
    """

    dir: str = Field(default="", description="folder of `baton certs`; for the roles of one machine")
    cert: str = Field(default="", description="this process's certificate, with its chain")
    key: str = Field(default="", description="its key")
    ca: str = Field(default="", description="the CAs of the cluster's own certificates")
    domain: str = Field(default="baton.internal", pattern=r"^[a-z0-9.-]{1,200}$", description="of roles' names")
    public_cert: str = Field(default="", description="the router's certificate for clients; empty: its own")
    public_key: str = Field(default="", description="its key")
    client_ca: str = Field(default="", description="CA of the certificate that clients must show; empty: none")
    client_names: tuple[str, ...] = Field(default=(), description="DNS names of which it must carry one")
    trusted_network: bool = Field(
        default=False, description="the network between workers is trusted: KV may go by what can't be encrypted"
    )

    @property
    def enabled(self) -> bool:
        """Whether anything is to be encrypted."""
        return bool(self.dir or self.cert)

    @model_validator(mode="after")
    def _whole(self) -> TlsConfig:
        named = {"cert": self.cert, "key": self.key, "ca": self.ca}
        if any(named.values()) and not all(named.values()):
            missing = ", ".join(name for name, path in named.items() if not path)
            raise ValueError(f"tls.cert, tls.key and tls.ca belong together: {missing} is missing")
        if self.dir and self.cert:
            raise ValueError("give tls.dir, or tls.cert, tls.key and tls.ca; not both")
        if bool(self.public_cert) != bool(self.public_key):
            raise ValueError("tls.public_cert and tls.public_key belong together")
        if (self.public_cert or self.client_ca) and not self.enabled:
            raise ValueError("tls.public_cert and tls.client_ca need tls.dir, or tls.cert, tls.key and tls.ca")
        if self.client_names and not self.client_ca:
            raise ValueError("tls.client_names needs tls.client_ca")
        return self


class ControllerConfig(Section):
    """The ratio's controller, in one of the routers. Times in seconds; docs/ratio.md says how it decides.

    The SLOs are those of requests whose context class names none.
    """

    mode: Literal["off", "advise", "auto"] = Field(
        default="advise", description="auto changes workers' roles; advise only says what it would do"
    )
    interval_s: float = Field(default=5.0, ge=0.5, le=60, description="between two looks")
    window_s: float = Field(default=20.0, ge=2, le=600, description="of traffic that counts as present")
    ttft_s: float = Field(default=2.0, gt=0, description="wanted to the first token")
    tpot_s: float = Field(default=0.1, gt=0, description="wanted between tokens, in the mean")
    high: float = Field(default=0.85, gt=0, le=2, description="fullness of a role below which nothing is changed")
    least_gain: float = Field(default=0.10, ge=0, le=1, description="of fullness, for a change to be worth it")
    confirm: int = Field(default=2, ge=1, le=20, description="looks in a row that must agree")
    cooldown_s: float = Field(default=10.0, ge=0, description="after a change")
    horizon_s: float = Field(default=30.0, gt=0, description="in which a change must pay, and queues be done")
    most_moves: int = Field(default=2, ge=1, le=64, description="workers that change at once")
    error_bound: float = Field(default=0.5, gt=0, description="error of the twin above which it gives no advice")
    grace_s: float = Field(default=1.0, ge=0, le=600, description="for prompts being read when a worker changes")
    dial_s: float = Field(default=60.0, ge=0, description="between simulations of every ratio; 0: none")


class BatonConfig(Section):
    """All sections. ``load_config`` builds it, and turns every mistake into a ``ConfigError``."""

    router: RouterConfig = RouterConfig()
    worker: WorkerConfig = WorkerConfig()
    cluster: ClusterConfig = ClusterConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    tls: TlsConfig = TlsConfig()
    controller: ControllerConfig = ControllerConfig()


class _Sources(BatonConfig, BaseSettings):  # type: ignore[misc]
    """Where the values come from: flags, then the environment, then the file."""

    model_config = SettingsConfigDict(env_prefix="BATON_", env_nested_delimiter="__", extra="forbid", frozen=True)

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, settings_cls: type[BaseSettings], init_settings: Source, env_settings: Source, **_: Source
    ) -> tuple[Source, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load_config(
    path: str | None = None, flags: Mapping[str, Mapping[str, Any]] | None = None, search: Path | None = None
) -> BatonConfig:
    """The config of this run. ``path`` must exist when given; else ``baton.toml`` in ``search`` if there is one.

    ``flags`` maps section -> key -> value; None values are absent. Raises ConfigError naming the key.
    """
    given = {s: {k: v for k, v in keys.items() if v is not None} for s, keys in (flags or {}).items()}
    file = _config_file(path, search or Path.cwd())
    sources = type("Sources", (_Sources,), {"model_config": SettingsConfigDict(toml_file=file)})
    try:
        return _checked(BatonConfig.model_validate(sources(**given).model_dump()))
    except ValidationError as error:
        raise _as_config_error(error) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}", "config") from None
    except ValueError as error:  # a list or table in the environment that is not JSON
        raise ConfigError(f"{error}; correct the BATON_… variable in the environment") from None


def _config_file(path: str | None, search: Path) -> Path | None:
    file = Path(path) if path else search / "baton.toml"
    if file.is_file():
        return file
    if path:
        raise ConfigError(f"--config {file}: no such file", "config")
    return None


def _checked(config: BatonConfig) -> BatonConfig:
    router = config.router
    known = router.keys_file or config.tls.client_ca
    if router.host not in LOOPBACK and not router.insecure and not known:
        raise ConfigError(
            f"router.host {router.host} can be reached from outside and there is no authentication: "
            "keep 127.0.0.1, name a router.keys_file (`baton keys add`) or a tls.client_ca, or say --insecure if "
            "you want that",
            "router.host",
        )
    if router.processes > 1 and not (router.port and router.grpc_port):
        raise ConfigError(
            "router.processes share their ports, so they must be named: set router.port and router.grpc_port",
            "router.processes",
        )
    if router.port and router.port == router.grpc_port:
        raise ConfigError(
            f"router.port and router.grpc_port are both {router.port}: set --grpc-port", "router.grpc_port"
        )
    _check_pools(config)
    reads = config.cluster.prefill or any(pool.role == "prefill" and pool.count for pool in config.cluster.pools)
    if not config.cluster.colocated and not reads:
        raise ConfigError("cluster.prefill is 0: give --prefill 1 or more, or use --colocated", "cluster.prefill")
    if config.worker.disk_tier_bytes and not config.worker.disk_tier_dir:
        raise ConfigError(
            "worker.disk_tier_bytes needs a place: set worker.disk_tier_dir to a directory on a local disk",
            "worker.disk_tier_dir",
        )
    redis = config.redis
    url = with_credentials(redis.url, redis.username, redis.password, redis.ca, redis.cert, redis.key)
    return config.model_copy(update={"redis": redis.model_copy(update={"url": url})})


def _check_pools(config: BatonConfig) -> None:
    pools = config.cluster.pools
    if len({pool.name for pool in pools} - {"prefill", "decode"}) < len(pools):
        raise ConfigError(
            "cluster.pools: give each a name of its own, and none of prefill and decode", "cluster.pools"
        )
    for pool in pools:
        try:
            pool_worker(config.worker, pool)
        except ValidationError as error:
            first = error.errors()[0]
            key = f"cluster.pools {pool.name}: worker.{'.'.join(str(part) for part in first['loc'])}"
            raise ConfigError(f"{key}: {first['msg']}, got {first['input']!r}", "cluster.pools") from None


def pool_worker(worker: WorkerConfig, pool: Pool) -> WorkerConfig:
    """What a pool's workers run."""
    return WorkerConfig.model_validate(worker.model_dump() | pool.worker)


def _as_config_error(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    section, _, last = key.partition(".")
    if first["type"] == "extra_forbidden":
        return ConfigError(f"unknown setting {key}; {_choices(section if last else '')}", key)
    variable = f"BATON_{section}__{last}".upper()
    source = f" (from {variable})" if variable in os.environ else ""
    return ConfigError(f"{key or 'config'}: {first['msg']}, got {first['input']!r}{source}", key)


def _choices(section: str) -> str:
    field = BatonConfig.model_fields.get(section)
    if field is None:
        return f"sections are {', '.join(BatonConfig.model_fields)}"
    return f"[{section}] has {', '.join(sorted(type(field.default).model_fields))}"
