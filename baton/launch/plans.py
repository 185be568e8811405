"""From the config to what each slot runs, and which model that is.

Knows nothing of Ray, processes or checkpoints' insides; a model is a directory, a hub id or a paced profile.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

import baton
from baton.cluster.config import BatonConfig, Pool, pool_worker
from baton.kv.transport import check_name, check_secured
from baton.launch.supervise import HostPlan
from baton.process.security import files_of
from baton.protos.errors import CheckpointError, ConfigError
from baton.worker.spec import WorkerSpec, dump_spec

DEMO = Path(baton.__file__).resolve().parents[1] / "models" / "demo"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TEXT_FILES = ("tokenizer*", "*.json", "*.jinja")
TOKENIZER = "tokenizer.json"
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "*.tiktoken", "*.gguf")


def is_paced(config: BatonConfig) -> bool:
    """Whether workers run a paced engine, which needs no model."""
    return config.worker.device.startswith("paced:")


def resolve_model(config: BatonConfig) -> str:
    """The directory or hub id to serve; empty for a paced engine without one.

    Raises CheckpointError, also for a directory without what its text is read and written with.
    """
    model = config.worker.model
    if is_paced(config) and not model:
        return ""
    path = Path(model).expanduser() if model else DEMO
    if path.is_dir():
        return str((path if is_paced(config) else require_tokenizer(path)).resolve())
    if not model or path.exists() or not HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"there is no model directory at {path}: --model takes a directory with config.json, safetensors and "
            "tokenizer.json, or a Hugging Face id such as Qwen/Qwen3-0.6B",
            "worker.model",
        )
    return model


def text_directory(model: str, paced: bool = False) -> Path | None:
    """Where the tokenizer's files lie (fetched from the hub for an id); None for a paced engine without.

    Raises CheckpointError.
    """
    if not model:
        return None
    found = Path(model) if Path(model).is_dir() else _text_from_hub(model)
    if paced and not (found / TOKENIZER).is_file():
        return None
    return require_tokenizer(found)


def require_tokenizer(directory: Path) -> Path:
    """``directory``, which has a tokenizer.json. Raises CheckpointError naming what is there instead."""
    if (directory / TOKENIZER).is_file():
        return directory
    others = sorted(p.name for pattern in OTHER_TOKENIZERS for p in directory.glob(pattern))
    beside = f" (it has {', '.join(others)}, which is another format)" if others else ""
    raise CheckpointError(
        f"{directory} has no {TOKENIZER}{beside}, so text could be neither read nor written: copy it from the "
        "model's Hugging Face repository, or let transformers write it there: "
        "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY)",
        "worker.model",
    )


def _text_from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(TEXT_FILES)))
    except Exception as error:  # the hub's errors share no base class
        raise CheckpointError(f"the tokenizer of {model} can't be fetched: {error}", "worker.model") from None


def slots_of(config: BatonConfig) -> list[tuple[str, str]]:
    """(slot, role) of every worker. Colocated workers are decode workers that run their prompts themselves."""
    names = [("prefill", i) for i in range(config.cluster.readers)] + [
        ("decode", i) for i in range(config.cluster.decode)
    ]
    pooled = [(f"{pool.name}-{i}", pool.role) for pool in config.cluster.pools for i in range(pool.count)]
    return [(f"{role}-{i}", role) for role, i in names] + pooled


def worker_plans(config: BatonConfig, model: str, redis_url: str, slot_dir: Path, log_dir: Path) -> list[HostPlan]:
    """One plan per slot. Raises ConfigError."""
    _require_own_ports(config)
    threads, owner = config.worker.threads or _share_of_cores(config), 0 if config.ray.address else os.getpid()
    plans = []
    for slot, role in slots_of(config):
        own = config_of(config, slot)
        spec = worker_spec(own, slot, role, model, redis_url, slot_dir, own.worker.threads or threads, owner)
        plan = HostPlan(slot, role, dump_spec(spec), str(slot_dir), str(log_dir / f"{slot}.log"))
        plans.append(in_pool(config, plan))
    return plans


def config_of(config: BatonConfig, slot: str) -> BatonConfig:
    """With the worker settings of the slot's pool, where it is in one."""
    pool = _pool_of(config, slot)
    return config if pool is None else config.model_copy(update={"worker": pool_worker(config.worker, pool)})


def in_pool(config: BatonConfig, plan: HostPlan) -> HostPlan:
    """With what its pool asks of a node, where it is in one."""
    pool = _pool_of(config, plan.slot)
    if pool is None:
        return plan
    asked = {"resources": dict(pool.resources), "labels": dict(pool.labels), "gang": pool.gang}
    return msgspec.structs.replace(plan, **asked)


def _pool_of(config: BatonConfig, slot: str) -> Pool | None:
    return next((pool for pool in config.cluster.pools if pool.name == slot.rpartition("-")[0]), None)


def worker_spec(
    config: BatonConfig,
    slot: str,
    role: str,
    model: str,
    redis_url: str,
    slot_dir: Path,
    threads: int,
    owner_pid: int = 0,
) -> WorkerSpec:
    """What the config says, for one slot. ``owner_pid``: the process that it ends with; 0: none."""
    tls = files_of(config.tls, "worker")
    check_secured(check_name(config.worker.kv_transport), tls)
    settings = config.worker.model_dump(exclude={"model", "threads"})
    return WorkerSpec(
        slot=slot,
        role="prefill" if role == "prefill" else "decode",
        slot_dir=str(slot_dir),
        model=model,
        threads=threads,
        redis_url=redis_url,
        namespace=config.cluster.namespace,
        beat_s=config.redis.beat_s,
        lease_s=config.redis.lease_s,
        tls=tls,
        otlp_endpoint=config.telemetry.otlp_endpoint,
        telemetry=config.telemetry.enabled,
        vllm_names=config.telemetry.vllm_names,
        log_level=config.telemetry.log_level,
        loop_stall_s=config.telemetry.loop_stall_s,
        owner_pid=owner_pid,
        **settings,
    )


def _require_own_ports(config: BatonConfig) -> None:
    """Workers of one machine can't share a port. Raises ConfigError naming it."""
    if config.ray.address or len(slots_of(config)) == 1:
        return
    for key in ("port", "data_port", "metrics_port"):
        if getattr(config.worker, key):
            raise ConfigError(
                f"worker.{key} {getattr(config.worker, key)} can't be that of {len(slots_of(config))} workers on "
                "one machine: set it to 0, or start them one by one (`baton worker`)",
                f"worker.{key}",
            )


def model_name(config: BatonConfig, model: str) -> str:
    """The name clients use."""
    return WorkerSpec(
        "", "decode", "", model=model, model_name=config.worker.model_name, device=config.worker.device
    ).model_id


def _share_of_cores(config: BatonConfig) -> int:
    """Torch threads per worker on this machine; 0 (the worker decides) where Ray may place it elsewhere."""
    if config.ray.address:
        return 0
    return max(1, len(os.sched_getaffinity(0)) // len(slots_of(config)))
