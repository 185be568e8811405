"""One run of a cluster on this machine: its ports, folders, Redis, config file, plans of workers, and readiness.

Knows nothing of Ray, of event loops, or of how a process is started and watched: ``local.LocalCluster`` does that
for ``baton serve``, ``fleet.Fleet`` for tests and benches.
"""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from baton.cluster.config import BatonConfig, ClusterConfig
from baton.cluster.roles import forget_roles
from baton.cluster.scale import forget_scale
from baton.cluster.served_model import model_name
from baton.cluster.store.redis_url import masked
from baton.launch.cores_page import CoresPage
from baton.launch.plans import lent_cores, slots_of, worker_plans
from baton.launch.ports import dialled, with_ports
from baton.launch.redis_server import RedisServer, check_redis
from baton.launch.run_files import RunFiles, choose_root
from baton.launch.servable import servable_model
from baton.launch.supervise import HostPlan, SlotStatus
from baton.process.processes import end_sessions
from baton.process.security import probing_context
from baton.protos.errors import BatonError, StartupError, from_info
from baton.worker.slots import close_slots, holders

READY_S = 2.0  # seconds for an answer to one probe: a router that takes longer isn't ready yet
METRICS_S = 5.0  # seconds for a router's /metrics, which are long where there are many workers


class ClusterRun:
    """Holds a run's ``config``, with free ports and the model resolved, and its folders under ``root``.

    ``root`` None takes ``cluster.run_dir``, or a new temporary folder. Raises ConfigError.
    """

    def __init__(self, config: BatonConfig, root: Path | None = None) -> None:
        self.model = servable_model(config)
        self.name = model_name(config, self.model)
        self.config = with_ports(_updated(config, "worker", model=self.model))
        self.files = RunFiles(root or choose_root(config), alone=True)
        scheme, router = "https" if config.tls.enabled else "http", self.config.router
        self.host, self.port = dialled(router.host), router.port
        self.url, self.grpc = f"{scheme}://{self.host}:{router.port}", f"{self.host}:{router.grpc_port}"
        self._tls = probing_context(config)
        self._redis = None if config.redis.url else RedisServer(self.files.redis)
        self._cores = CoresPage()

    # ---- Redis ---------------------------------------------------------------------------------------------

    @property
    def redis_pid(self) -> int | None:
        """Returns the pid of the private Redis; None if it doesn't run, or others run Redis."""
        return self._redis.pid if self._redis else None

    @property
    def cores_page(self) -> str:
        """Returns the path at which workers open the shared memory by which they lend one another cores."""
        return self._cores.path

    def start_redis(self) -> str:
        """Starts the private Redis, or checks the configured one; returns a description without its password.

        Roles and numbers of workers that an earlier run left in the configured one are deleted. Call it from the
        main thread. Raises StartupError and ConfigError.
        """
        if self._redis is not None:
            self.config = _updated(self.config, "redis", url=self._redis.start().url)
            return f"private, {self.config.redis.url}"
        url, namespace = self.config.redis.url, self.config.cluster.namespace
        check_redis(url)
        forget_roles(url, namespace)
        forget_scale(url, namespace)
        return masked(url)

    def tend_redis(self) -> bool:
        """Starts the private Redis again if it has ended; returns whether it had.

        The start may fail: call it again and again.
        """
        if self._redis is None or self._redis.pid is not None:
            return False
        with contextlib.suppress(StartupError, OSError):
            self._redis.start()
        return True

    # ---- what processes are told ---------------------------------------------------------------------------

    def write_config(self) -> str:
        """Writes the config file that the router's process reads; returns its path.

        Defaults are left out, so that a build that doesn't know the newest settings reads it too.
        """
        self.files.config.write_text(self.config.model_dump_json(indent=1, exclude_defaults=True))
        return str(self.files.config)

    def plans(self) -> list[HostPlan]:
        """Returns one plan per worker slot, by the current config. Raises ConfigError."""
        return self._plans(self.config)

    def resize(self, prefill: int, decode: int) -> list[HostPlan]:
        """Changes the numbers of workers in the config; returns the plans of all slots.

        Raises ValueError and BatonError.
        """
        numbers = {"prefill": prefill, "decode": decode}
        cluster = ClusterConfig.model_validate(self.config.cluster.model_dump() | numbers)
        config = self.config.model_copy(update={"cluster": cluster})
        plans = self._plans(config)
        self.config = config
        return plans

    def _plans(self, config: BatonConfig) -> list[HostPlan]:
        page = self.cores_page if lent_cores(config) else ""
        return worker_plans(config, self.model, config.redis.url, self.files.slots, self.files.logs, page)

    # ---- whether it is up ----------------------------------------------------------------------------------

    def has_all(self, statuses: Iterable[SlotStatus]) -> bool:
        """Returns whether the slots that ``statuses`` call ready are exactly those of the config."""
        ready = {status.slot for status in statuses if status.state == "ready"}
        return ready == {slot for slot, _ in slots_of(self.config)}

    def is_ready(self) -> bool:
        """Returns whether the router's /ready answers with 200. Blocks for READY_S at most."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=READY_S, context=self._tls) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def reachable(self) -> int:
        """Returns how many workers the router reaches, by its metric ``baton_workers``.

        Raises OSError if it doesn't answer.
        """
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=METRICS_S, context=self._tls) as response:
            lines = response.read().decode().splitlines()
        return round(sum(float(line.split()[-1]) for line in lines if line.startswith("baton_workers{")))

    def late(self, timeout_s: float, statuses: Iterable[SlotStatus]) -> StartupError:
        """Returns the error for a cluster that isn't up after ``timeout_s`` seconds, with each slot's state."""
        states = ", ".join(f"{s.slot} {s.state}" for s in statuses) or "no worker was placed"
        return StartupError(f"not ready after {timeout_s:g} s ({states}); logs in {self.files.logs}")

    # ---- its end -------------------------------------------------------------------------------------------

    def hosts(self) -> dict[str, int]:
        """Returns slot -> pid of every worker host that runs now."""
        return holders(self.files.slots)

    def close_slots(self) -> None:
        """Prevents hosts from starting in any slot from now on."""
        close_slots(self.files.slots)
        self._cores.close()

    def end_hosts(self, grace_s: float) -> None:
        """Sends SIGTERM to every running worker host, and SIGKILL after ``grace_s`` seconds to what is left of its
        session.
        """
        end_sessions(self.hosts().values(), grace_s)

    def stop_redis(self) -> None:
        """Stops the private Redis, if there is one."""
        if self._redis:
            self._redis.stop()


def failure_of(status: SlotStatus) -> BatonError | None:
    """Returns the error for which a slot's host won't be started any more; None unless its state is "failed"."""
    return from_info(status.error) if status.state == "failed" and status.error is not None else None


def _updated(config: BatonConfig, section: str, **values: str) -> BatonConfig:
    """Returns ``config`` with other values in one of its sections."""
    before: BaseModel = getattr(config, section)
    return config.model_copy(update={section: before.model_copy(update=values)})
