"""One part of a cluster in this process, a router or a worker: what a pod, a unit file or a container runs.

Knows nothing of the other parts but where Redis is, and supervises nothing. Signals, draining and exit codes are
those of the parts' own hosts; whoever starts this process restarts it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import NoReturn

from baton.cluster.config import BatonConfig
from baton.cluster.served_model import resolve_model
from baton.launch.plans import config_of, worker_spec
from baton.launch.run_files import RunFiles, choose_root
from baton.process.processes import end_sessions
from baton.process.security import files_of
from baton.process.time_limit import end_with
from baton.protos.errors import ConfigError
from baton.worker.slots import close_slots, holders

SLOT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LEAVE_S = 8.0  # beyond their drain
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def run_router(config: BatonConfig) -> int:
    """Runs a router until SIGTERM or SIGINT; returns the exit status. Raises CheckpointError, and ConfigError, also
    if another router or cluster has the run's folder.
    """
    from baton.router_host import main as router_host

    config = _complete(config)
    files = RunFiles(choose_root(config), alone=True)  # its end, or its failure to start, takes the file away
    files.config.touch(mode=0o600)
    files.config.write_text(config.model_dump_json(indent=1))  # for router.processes beyond the first
    try:
        return router_host.run(config, files.config)
    finally:
        files.config.unlink(missing_ok=True)  # by which commands know that a cluster runs here


def run_worker(config: BatonConfig, role: str, slot: str = "") -> NoReturn:
    """Runs a worker of ``role`` until SIGTERM, SIGINT or its engine's end; ends the process, never returns.

    ``slot`` is its name in the cluster, stable over restarts; "" takes the host's name (a pod's). Raises
    ConfigError and CheckpointError.
    """
    from baton.worker import host as worker_host

    name = slot or socket.gethostname()
    if not SLOT.fullmatch(name):
        raise ConfigError(f"slot {name!r}: use letters, digits, '.', '_' or '-' (--slot NAME)", "slot")
    config = _complete(config_of(config, name, role))
    files = RunFiles(choose_root(config))
    threads = config.worker.threads or usable_cores()
    spec = worker_spec(config, name, role, config.worker.model, config.redis.url, files.slots, threads)
    end_with(lambda: worker_host.run(spec))


def run_ranks(config: BatonConfig, listen: str) -> int:
    """Serves this host's cores to leads on other hosts, at ``listen`` (host:port), until SIGTERM or SIGINT;
    returns 0. Those that run then have worker.drain_grace_s seconds until they are ended. With [tls] leads must
    show a worker's certificate. Raises ConfigError.
    """
    from baton.engine.backends.ranks.hosts.agent import RankAgent

    logging.basicConfig(level=config.telemetry.log_level.upper(), format="%(asctime)s ranks %(message)s")
    tls, ended = files_of(config.tls, "worker"), threading.Event()
    agent = RankAgent(listen, config.worker.rank_key_file, tls=tls)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    print(f"ranks of other hosts' workers start at {agent.address}", flush=True)  # for whoever asked for port 0
    agent.serve(lambda: not ended.is_set(), config.worker.drain_grace_s)
    return 0


def drain_workers(config: BatonConfig) -> int:
    """Drains and ends every worker of ``cluster.run_dir`` and prevents further starts, as a pod's preStop; returns
    0.

    Raises ConfigError if ``cluster.run_dir`` is empty.
    """
    if not config.cluster.run_dir:
        raise ConfigError(
            "cluster.run_dir is empty: name the folder that the workers were started in", "cluster.run_dir"
        )
    folder = Path(config.cluster.run_dir) / "slots"
    if not folder.is_dir():
        return 0
    close_slots(folder)
    end_sessions(holders(folder).values(), config.worker.drain_grace_s + LEAVE_S)
    return 0


def usable_cores(cpu_max: Path = CPU_MAX) -> int:
    """Returns how many cores this process may keep busy: those of its affinity, at most the container's CPU limit.

    ``cpu_max`` is the cgroup v2 file that holds the limit.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, _, period = cpu_max.read_text().partition(" ")
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return allowed


def _complete(config: BatonConfig) -> BatonConfig:
    """Returns the configuration with the model's path resolved. Raises ConfigError when there is no Redis to meet
    the other parts in.
    """
    if not config.redis.url:
        raise ConfigError(
            "redis.url is empty, and a router and a worker that are started alone meet in Redis: set it in "
            "baton.toml, or BATON_REDIS__URL=redis://HOST:6379 in the environment",
            "redis.url",
        )
    model = resolve_model(config)
    return config.model_copy(update={"worker": config.worker.model_copy(update={"model": model})})
