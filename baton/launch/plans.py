"""The plan of each worker slot by the config: what runs in it, with which settings.

Knows nothing of Ray, processes or models.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from baton.cluster.config import BatonConfig, Pool, WorkerConfig, pool_worker
from baton.cluster.sections.cluster import role_worker
from baton.engine.program.shares import Widths
from baton.engine.speculate.names import placed
from baton.kv.transport import check_name, check_secured
from baton.launch.supervise import HostPlan
from baton.process.security import files_of
from baton.protos.errors import ConfigError
from baton.worker.spec import WorkerSpec, dump_spec


def slots_of(config: BatonConfig) -> list[tuple[str, str]]:
    """Returns (slot name, role) of every worker: ("decode-0", "decode") for example.

    Workers of a colocated cluster have the role decode and prefill their own prompts.
    """
    names = [("prefill", i) for i in range(config.cluster.prefill_workers)] + [
        ("decode", i) for i in range(config.cluster.decode)
    ]
    pooled = [(f"{pool.name}-{i}", pool.role) for pool in config.cluster.pools for i in range(pool.count)]
    return [(f"{role}-{i}", role) for role, i in names] + pooled


def worker_plans(
    config: BatonConfig, model: str, redis_url: str, slot_dir: Path, log_dir: Path, cores_page: str = ""
) -> list[HostPlan]:
    """Returns one plan per slot; workers that lend one another cores do so by the memory at path ``cores_page``.

    Raises ConfigError.
    """
    _require_own_ports(config)
    threads, owner = config.worker.threads or _share_of_cores(config), 0 if config.ray.address else os.getpid()
    plans, lent, sharers = [], lent_cores(config), workers_on_gpu(config)
    for slot, role in slots_of(config):
        own = config_of(config, slot, role)
        spec = worker_spec(own, slot, role, model, redis_url, slot_dir, own.worker.threads or threads, owner)
        if cores_page and lent and _lends(own):
            engine = msgspec.structs.replace(spec.engine, cores_page=cores_page, all_cores=lent)
            spec = msgspec.structs.replace(spec, engine=engine)
        if sharers > 1:
            on_card = workers_on_card(config, own.worker)
            cache = msgspec.structs.replace(spec.cache, kv_sharers=sharers, card_sharers=on_card)
            spec = msgspec.structs.replace(spec, cache=cache)
        log, cards = str(log_dir / f"{slot}.log"), cards_of(own.worker)
        plan = HostPlan(slot, role, dump_spec(spec), str(slot_dir), log, cards=cards)
        plans.append(in_pool(config, plan))
    return plans


def config_of(config: BatonConfig, slot: str, role: str) -> BatonConfig:
    """Returns the config with [worker] as it is for the slot: with the settings of its pool, or else of its
    role.
    """
    pool = _pool_of(config, slot)
    if pool is not None:
        return config.model_copy(update={"worker": pool_worker(config.worker, pool)})
    return config.model_copy(update={"worker": role_worker(config.worker, config.cluster, role)})


def in_pool(config: BatonConfig, plan: HostPlan) -> HostPlan:
    """Returns the plan with the node resources and labels that its slot's pool asks for; unchanged if it is in no
    pool.

    A worker of several ranks asks for one bundle of resources per rank; those of a worker on several nodes are
    dealt among them. Ranks on GPUs ask for all of a node's in one bundle, because a process of Ray's sees those of
    its own bundle alone. Raises ConfigError.
    """
    pool = _pool_of(config, plan.slot)
    if pool is None:
        return plan
    worker = pool_worker(config.worker, pool)
    _require_hosts(config, pool, worker)
    ranks = ranks_of(worker).count if pool.resources else 1
    gang, resources = max(pool.gang, -(-ranks // pool.hosts)), dict(pool.resources)
    if worker.device == "cuda":
        gang, resources = 1, {name: amount * gang for name, amount in resources.items()}
    return msgspec.structs.replace(
        plan,
        resources=resources,
        labels=dict(pool.labels),
        gang=gang,
        hosts=pool.hosts,
        rank_key_file=worker.rank_key_file,
        rank_tls=files_of(config.tls, "worker") if pool.hosts > 1 else None,
    )


def _require_hosts(config: BatonConfig, pool: Pool, worker: WorkerConfig) -> None:
    """Checks that a worker of a pool can be on as many nodes as the pool says. Raises ConfigError."""
    field, ranks = f"cluster.pools.{pool.name}.hosts", ranks_of(worker).count
    if pool.hosts == 1:
        return
    if not config.ray.address:
        raise ConfigError(
            f"{field} is {pool.hosts}, and there is one node: join a Ray cluster (ray.address)", field
        )
    if worker.rank_hosts:
        raise ConfigError(f"{field} is {pool.hosts}, and worker.rank_hosts names hosts: drop one of them", field)
    if ranks < pool.hosts:
        text = f"{field} is {pool.hosts}, and a worker has {ranks} ranks: raise worker.pp or worker.tp"
        raise ConfigError(f"{text} to {pool.hosts} or more, or lower hosts", field)


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
    """Returns the spec that a slot's worker host is started with; ``threads`` 0 lets the worker choose.

    ``owner_pid`` is the process with which the worker ends; 0 means none. Raises ConfigError.
    """
    tls = files_of(config.tls, "worker")
    check_secured(check_name(config.worker.kv_transport), tls)
    settings = config.worker.model_dump(exclude={"model", "threads"})
    settings["speculation"] = placed(config.worker.speculation)
    settings["cache_dir"] = os.path.expanduser(config.worker.cache_dir)
    settings["pace_beside_prompts_s"] = pace_of(config)
    return WorkerSpec.of(
        slot,
        "prefill" if role == "prefill" else "decode",
        slot_dir,
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
        adapter_root=config.adapters.root,
        max_adapters=config.adapters.max_loaded,
        max_adapter_bytes=config.adapters.max_bytes,
        max_adapter_rank=config.adapters.max_rank,
        **settings,
    )


def workers_on_gpu(config: BatonConfig) -> int:
    """Returns how many workers on GPUs divide this machine's memory; 1 where Ray spreads them over nodes."""
    return 1 if config.ray.address else max(1, len(_on_gpus(config)))


def workers_on_card(config: BatonConfig, worker: WorkerConfig) -> int:
    """Returns how many workers divide a card of one with these settings; 1 where its ranks have cards of their own,
    or Ray gives each worker one.
    """
    if config.ray.address or cards_of(worker) > 1:
        return 1
    return max(1, sum(cards_of(each) == 1 for each in _on_gpus(config)))


def _on_gpus(config: BatonConfig) -> list[WorkerConfig]:
    found = (config_of(config, slot, role).worker for slot, role in slots_of(config))
    return [worker for worker in found if worker.device == "cuda"]


def pace_of(config: BatonConfig) -> float:
    """Returns the least seconds between decode steps while prompts are computed.

    It is ``worker.pace_beside_prompts_s``, but at most half of the strictest context class's time per output token.
    """
    wanted = [c.slo_tpot_s for c in config.router.context_classes if c.slo_tpot_s]
    return min([config.worker.pace_beside_prompts_s, *(tpot_s / 2 for tpot_s in wanted)])


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


def lent_cores(config: BatonConfig) -> int:
    """Returns how many of this machine's cores its workers lend one another; 0 if none.

    Workers that have threads of their own, several ranks, or another device than the CPU keep their cores.
    """
    if not config.cluster.lend_cores or config.ray.address:
        return 0
    each, own = _share_of_cores(config), [config_of(config, slot, role) for slot, role in slots_of(config)]
    kept = sum(one.worker.threads or each for one in own if not _lends(one))
    lending = sum(map(_lends, own))
    return max(len(os.sched_getaffinity(0)) - kept, each) if lending > 1 else 0


def _lends(config: BatonConfig) -> bool:
    worker = config.worker
    return worker.device == "cpu" and ranks_of(worker).count == 1 and not worker.threads


def ranks_of(worker: WorkerConfig) -> Widths:
    """Returns the numbers of ranks (tp, cp, pp, ep) of a worker with these settings."""
    return Widths(worker.tp, worker.cp, worker.pp, worker.ep)


def cards_of(worker: WorkerConfig) -> int:
    """Returns the number of GPUs that a worker with these settings takes if it takes any: one for each rank."""
    return ranks_of(worker).count if worker.device in ("auto", "cuda") else 1


def _share_of_cores(config: BatonConfig) -> int:
    """Torch threads per worker on this machine; 0 (the worker decides) where Ray may place it elsewhere."""
    if config.ray.address:
        return 0
    return max(1, len(os.sched_getaffinity(0)) // len(slots_of(config)))
