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

from baton.protos.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Section(BaseModel):
    """A frozen table of the config file; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ContextClass(Section):
    """Requests of at most ``max_tokens`` tokens (prompt), first class that fits; 0 takes the rest.

    SLOs in seconds for requests that name none themselves; 0: none. One that would miss it is refused early.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")
    max_tokens: int = Field(default=0, ge=0)
    slo_ttft_s: float = Field(default=0.0, ge=0)
    slo_tpot_s: float = Field(default=0.0, ge=0)


DEFAULT_CLASSES = (
    ContextClass(name="short", max_tokens=1024),
    ContextClass(name="medium", max_tokens=8192),
    ContextClass(name="long", max_tokens=0),
)


class RouterConfig(Section):
    """What clients meet. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    grpc_port: int = Field(default=8001, ge=0, le=65535)
    insecure: bool = False
    keys_file: str = Field(default="", description="API keys (`baton keys add`); empty asks nobody for a key")
    processes: int = Field(default=1, ge=1, le=64, description="router processes that share the ports")
    policy: str = "cost"
    hedge_prefill: float = Field(
        default=0.0, ge=0, description="a prefill this many times overdue goes to another worker; 0: never"
    )
    stall_s: float = Field(default=5.0, gt=0, description="a worker that makes no progress for so long is left")
    context_classes: tuple[ContextClass, ...] = DEFAULT_CLASSES
    max_queue: int = Field(default=1024, ge=1, description="requests that wait, per context class")
    max_inflight_bytes: int = Field(default=1 << 30, ge=1 << 20, description="prompts and answers held at once")
    request_timeout_s: float = Field(default=600.0, gt=0)
    shutdown_grace_s: float = Field(default=2.0, ge=0)
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_n: int = Field(default=16, ge=1)
    max_stop: int = Field(default=16, ge=1)
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

    model: str = ""
    model_name: str = Field(default="", description="the name clients use; empty takes the model's last path part")
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bf16", "int8", "fp8"] = "auto"
    quantization: Literal["none", "int8", "int4"] = Field(default="none", description="of plain weights, on load")
    cache_dir: str = Field(default="", description="of packed weights; empty: $BATON_CACHE_DIR or ~/.cache/baton")
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda|paced:.+)$")
    seed: int = 0
    host: str = Field(default="127.0.0.1", description="address its gRPC server binds and advertises")
    threads: int = Field(default=0, ge=0)
    pages: int = Field(default=0, ge=0, description="KV pages; 0 takes kv_memory_bytes")
    kv_memory_bytes: int = Field(default=512 << 20, ge=1 << 20)
    max_model_len: int = Field(default=0, ge=0, description="0 takes the model's own")
    max_batch: int = Field(default=64, ge=1)
    prefill_chunk_tokens: int = Field(default=512, ge=16)
    itl_target_s: float = Field(
        default=0.0, ge=0, description="seconds wanted between an answer's tokens; decode steps keep to it; 0: off"
    )
    lease_ttl_s: float = Field(default=30.0, gt=0)
    drain_grace_s: float = Field(default=2.0, ge=0)
    metrics: bool = True
    host_tier_bytes: int = Field(default=0, ge=0, description="host memory below the device's pages; 0: off")
    disk_tier_bytes: int = Field(default=0, ge=0, description="each worker's files below that; 0: off")
    disk_tier_dir: str = Field(default="", description="where those files lie; they survive a restart")
    kv_transport: str = Field(
        default="auto", description="how KV gets to decode workers; auto tries and measures each pair"
    )
    kv_codec: Literal["none", "int8", "fp8"] = Field(
        default="none", description="code KV for slow networks; lossy, and kept apart from exact KV in every cache"
    )


class ClusterConfig(Section):
    """How many workers of each role, and where a run keeps its sockets, locks and logs."""

    prefill: int = Field(default=1, ge=0, le=1024)
    decode: int = Field(default=1, ge=1, le=1024)
    colocated: bool = False
    namespace: str = Field(default="baton", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    run_dir: str = Field(default="", description="empty makes one for this run")
    start_timeout_s: float = Field(default=300.0, gt=0)


class RedisConfig(Section):
    """``url`` empty starts a private server. Beats and leases are membership's, in seconds."""

    url: str = ""
    beat_s: float = Field(default=0.5, gt=0)
    lease_s: float = Field(default=5.0, gt=0)


class RayConfig(Section):
    """``address`` empty starts a private Ray. ``auth_mode`` must agree on every node of the cluster."""

    address: str = ""
    auth_mode: Literal["token", "disabled"] = "token"
    object_store_bytes: int = Field(default=80 << 20, ge=80 << 20)


class TelemetryConfig(Section):
    """Spans go to ``otlp_endpoint`` (host:port, OTLP over gRPC); empty turns them off."""

    otlp_endpoint: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class BatonConfig(Section):
    """All sections. ``load_config`` builds it, and turns every mistake into a ``ConfigError``."""

    router: RouterConfig = RouterConfig()
    worker: WorkerConfig = WorkerConfig()
    cluster: ClusterConfig = ClusterConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    telemetry: TelemetryConfig = TelemetryConfig()


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
    if router.host not in LOOPBACK and not router.insecure and not router.keys_file:
        raise ConfigError(
            f"router.host {router.host} can be reached from outside and there is no authentication: "
            "keep 127.0.0.1, name a router.keys_file (`baton keys add`), or say --insecure if you want that",
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
    if not config.cluster.colocated and config.cluster.prefill == 0:
        raise ConfigError("cluster.prefill is 0: give --prefill 1 or more, or use --colocated", "cluster.prefill")
    if config.worker.disk_tier_bytes and not config.worker.disk_tier_dir:
        raise ConfigError(
            "worker.disk_tier_bytes needs a place: set worker.disk_tier_dir to a directory on a local disk",
            "worker.disk_tier_dir",
        )
    return config


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
