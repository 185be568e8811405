"""The configuration of a cluster: ``baton.toml``, overridden by ``BATON_SECTION__KEY`` in the environment,
overridden by flags.

Knows nothing of what reads a setting, nor whether a port is free or a model exists.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict, TomlConfigSettingsSource
from pydantic_settings import PydanticBaseSettingsSource as Source

from baton.cluster.hosts import LOOPBACK as LOOPBACK
from baton.cluster.model_id import DEMO_NAME, model_id
from baton.cluster.sections.adapters import AdaptersConfig
from baton.cluster.sections.base import Section
from baton.cluster.sections.cluster import ACCELERATORS_PER_ENGINE, ClusterConfig, Pool, pool_worker, ranks_on_cards
from baton.cluster.sections.controller import ControllerConfig
from baton.cluster.sections.router import DEFAULT_CLASSES, ContextClassSection, RouterConfig
from baton.cluster.sections.services import RayConfig, RedisConfig, TelemetryConfig
from baton.cluster.sections.tls import TlsConfig
from baton.cluster.sections.worker import WorkerConfig
from baton.cluster.store.redis_url import with_credentials
from baton.protos.adapter_id import require_name
from baton.protos.errors import AdapterRefused, ConfigError

__all__ = [
    "ACCELERATORS_PER_ENGINE",
    "DEFAULT_CLASSES",
    "LOOPBACK",
    "AdaptersConfig",
    "BatonConfig",
    "ClusterConfig",
    "ContextClassSection",
    "ControllerConfig",
    "Pool",
    "RayConfig",
    "RedisConfig",
    "RouterConfig",
    "Section",
    "TelemetryConfig",
    "TlsConfig",
    "WorkerConfig",
    "load_config",
    "pool_worker",
]


class BatonConfig(Section):
    """Holds all sections of the configuration.

    ``load_config`` builds it, and turns every mistake into a ``ConfigError``.
    """

    router: RouterConfig = RouterConfig()
    worker: WorkerConfig = WorkerConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    cluster: ClusterConfig = ClusterConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    tls: TlsConfig = TlsConfig()
    controller: ControllerConfig = ControllerConfig()


class _Sources(BatonConfig, BaseSettings):  # type: ignore[misc]
    """Loads values from the flags, then the environment, then the file; the first that has one wins."""

    model_config = SettingsConfigDict(env_prefix="BATON_", env_nested_delimiter="__", extra="forbid", frozen=True)

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, settings_cls: type[BaseSettings], init_settings: Source, env_settings: Source, **_: Source
    ) -> tuple[Source, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load_config(
    path: str | None = None, flags: Mapping[str, Mapping[str, object]] | None = None, search: Path | None = None
) -> BatonConfig:
    """Returns the configuration of this run, validated.

    ``path`` must exist if given; without it, ``baton.toml`` in ``search`` (default: the working directory) is read
    if there is one. ``flags`` maps section -> key -> value; None values count as absent. Raises ConfigError naming
    the key.
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
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no UTF-8 text: {error}", "config") from None
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
    _check_adapters(config)
    _check_pools(config)
    _check_names(config)
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


def _check_adapters(config: BatonConfig) -> None:
    named = config.worker.adapters
    for name in named:
        try:
            require_name(name)
        except AdapterRefused as error:
            raise ConfigError(f"worker.adapters: {error.message}", "worker.adapters") from None
    most = config.adapters.max_loaded
    if len(named) > most:
        raise ConfigError(
            f"worker.adapters names {len(named)}, adapters.max_loaded is {most}: raise it", "adapters.max_loaded"
        )


def _check_names(config: BatonConfig) -> None:
    """Refuses an adapter that has a model's name, because requests for it would be answered by the model."""
    workers = [config.worker, *(pool_worker(config.worker, pool) for pool in config.cluster.pools)]
    for name in {_model_of(worker) for worker in workers} & config.worker.adapters.keys():
        text = f"worker.adapters: {name!r} is the name of the model: give the adapter another, or set"
        raise ConfigError(f"{text} worker.model_name", "worker.adapters")


def _model_of(worker: WorkerConfig) -> str:
    """Returns the name by which clients ask for the model of ``worker``."""
    return model_id(worker.model_name, worker.model, worker.device) or DEMO_NAME


def _check_pools(config: BatonConfig) -> None:
    pools = config.cluster.pools
    if len({pool.name for pool in pools} - {"prefill", "decode"}) < len(pools):
        raise ConfigError(
            "cluster.pools: give each a name of its own, and none of prefill and decode", "cluster.pools"
        )
    for pool in pools:
        try:
            _check_gpus(pool, pool_worker(config.worker, pool))
        except ValidationError as error:
            first = error.errors()[0]
            key = f"cluster.pools {pool.name}: worker.{'.'.join(str(part) for part in first['loc'])}"
            why = _reason(first, WorkerConfig)
            raise ConfigError(f"{key}: {why}, got {first['input']!r}", "cluster.pools") from None


def _check_gpus(pool: Pool, worker: WorkerConfig) -> None:
    used = ranks_on_cards(worker) * ACCELERATORS_PER_ENGINE
    gang = max(pool.gang, ranks_on_cards(worker))  # a bundle per rank
    reserved = gang * pool.resources.get("GPU", 1.0 if worker.device == "cuda" else 0.0)
    if reserved > used or (used > 1 and reserved < used):
        more = "" if used > 1 else " and a higher count"
        raise ConfigError(
            f"cluster.pools {pool.name}: {reserved:g} GPUs would be reserved for each worker (gang {gang}), "
            f"and its engine computes on {used}: say GPU = 1, gang = {used}{more}",
            "cluster.pools",
        )


def _as_config_error(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    section, _, last = key.partition(".")
    if first["type"] == "extra_forbidden":
        return ConfigError(f"unknown setting {key}; {_choices(first['loc'][:-1])}", key)
    variable = f"BATON_{section}__{last}".upper()
    source = f" (from {variable})" if variable in os.environ else ""
    return ConfigError(f"{key or 'config'}: {_reason(first, BatonConfig)}, got {first['input']!r}{source}", key)


def _reason(error: ErrorDetails, model: type[BaseModel]) -> str:
    """Returns why a value isn't valid for its setting in ``model``, in words instead of a regular expression."""
    form = _described(model, error["loc"]) if error["type"] == "string_pattern_mismatch" else ""
    return f"not of the form wanted here ({form})" if form else error["msg"]


def _described(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """Returns the description of the setting at ``place`` in ``model``, "" if it has none."""
    field = model.model_fields.get(str(place[0]))
    if field is None:
        return ""
    rest = [part for part in place[1:] if isinstance(part, str)]
    if not rest:
        return field.description or ""
    inner = (get_args(field.annotation) or (field.annotation,))[0]
    return _described(inner, rest) if isinstance(inner, type) and issubclass(inner, BaseModel) else ""


def _choices(place: Sequence[int | str]) -> str:
    """Returns in words which keys there are at ``place``: a section, or a table of a list within one."""
    names = [str(part) for part in place if isinstance(part, str)]
    model: type[BaseModel] = BatonConfig
    for name in names:
        found = (get_args(model.model_fields[name].annotation) or (model.model_fields[name].annotation,))[0]
        if not (isinstance(found, type) and issubclass(found, BaseModel)):
            break
        model = found
    if model is BatonConfig:
        return f"sections are {', '.join(BatonConfig.model_fields)}"
    return f"[{'.'.join(names)}] has {', '.join(sorted(model.model_fields))}"
