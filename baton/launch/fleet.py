"""A whole cluster of real processes without Ray: Redis, worker hosts under their supervisors, one router.

What ``baton serve`` starts, less the placement: tests and benchmarks have one within a second, may kill what they
like in it, and leave nothing behind, however they end. Blocking; knows nothing of what is asked of the cluster.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

import msgspec

from baton.cluster.config import BatonConfig, load_config
from baton.cluster.served_model import model_name, resolve_model
from baton.launch.plans import worker_plans
from baton.launch.ports import HOST, free_ports
from baton.launch.redis_server import RedisServer
from baton.launch.supervise import HostSupervisor, host_environment
from baton.process.processes import die_with_parent, end_sessions
from baton.process.security import probing_context
from baton.protos.errors import StartupError, from_info
from baton.worker.slots import Slot, SlotRecord, close_slots, holders

UP_S = 90.0
GRACE_S, ROUTER_GRACE_S = 2.0, 3.0
LOOK_S = 0.02
STOP_EXTRA_S = 3.0  # beyond a host's own grace, until its session is killed


class Fleet(contextlib.AbstractContextManager["Fleet"]):
    """``with Fleet(cluster={"decode": 2}, worker={"device": "paced:zero"}) as fleet: … fleet.url …``.

    Sections are those of the config; ports are chosen here. Enter it from the main thread: Redis and the router end
    with the thread that started them, and worker hosts with this process.
    """

    command: tuple[str, ...] = ()  # what runs in each slot; empty: a worker host
    router_command: tuple[str, ...] = (sys.executable, "-m", "baton.router_host.main")

    def __init__(self, **sections: Any) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="bf-")  # short: unix sockets end at 107 bytes
        self.folder = Path(self._scratch.name)
        port, grpc_port = free_ports(2)
        router = {"port": port, "grpc_port": grpc_port} | sections.pop("router", {})
        self.config: BatonConfig = load_config(flags={"router": router, **sections}, search=self.folder)
        self.model = model_name(self.config, resolve_model(self.config))
        self.host, self.port = HOST, port
        self._tls, scheme = probing_context(self.config), "https" if self.config.tls.enabled else "http"
        self.url, self.grpc = f"{scheme}://{HOST}:{port}", f"{HOST}:{grpc_port}"
        self.router: subprocess.Popen[bytes] | None = None
        self._redis = RedisServer(self.folder / "redis")
        self._supervisors: dict[str, HostSupervisor] = {}

    def __enter__(self) -> Self:
        try:
            self._up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process; what doesn't listen is killed."""
        if self._supervisors:
            close_slots(self.folder / "slots")
        if self.router:
            self.router.send_signal(signal.SIGTERM)
        end_sessions(holders(self.folder / "slots").values(), GRACE_S)
        for supervisor in self._supervisors.values():
            supervisor.stop(0.0)
        if self.router:
            _end(self.router)
        self._redis.stop()
        self._scratch.cleanup()

    # ---- what is seen of it --------------------------------------------------------------------------

    @property
    def redis_pid(self) -> int | None:
        """The cluster's own Redis, while it runs."""
        return self._redis.pid

    @property
    def slots(self) -> list[str]:
        """Names of all slots whose hosts have begun."""
        return [p.stem for p in sorted((self.folder / "slots").glob("*.json"))]

    def record(self, slot: str) -> SlotRecord:
        """What the slot's last host says of itself."""
        record = Slot(self.folder / "slots", slot).read()
        if record is None:
            raise StartupError(f"no host of {slot} has said anything yet")
        return record

    def workers_ready(self) -> int:
        """Hosts that say so."""
        return sum(s.status().state == "ready" for s in self._supervisors.values())

    def reachable(self) -> int:
        """Workers that the router can reach, by its own metric. Raises OSError when the router doesn't answer."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=5, context=self._tls) as response:
            lines = response.read().decode().splitlines()
        return round(sum(float(line.split()[-1]) for line in lines if line.startswith("baton_workers{")))

    def answers(self) -> bool:
        """Whether the router says that it is ready, and reaches every worker that was planned."""
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=2, context=self._tls) as response:
                return response.status == 200 and self.reachable() == len(self._supervisors)
        except (urllib.error.URLError, OSError):
            return False

    def log(self, name: str, size: int = 3000) -> str:
        """The end of a slot's log, or of "router"; empty when there is none."""
        for path in (self.folder / f"{name}.log", self.folder / "logs" / f"{name}.log"):
            if path.exists():
                return path.read_text(errors="replace")[-size:]
        return ""

    # ---- up ------------------------------------------------------------------------------------------

    def start_router(self) -> None:
        """The router's process; also after somebody killed it."""
        path = self.folder / "config.json"
        path.write_text(self.config.model_dump_json(exclude_defaults=True))  # an older build reads it too
        with open(self.folder / "router.log", "ab") as log:
            self.router = subprocess.Popen(
                [*self.router_command, "--config", str(path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=host_environment(),
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def scale(self, prefill: int, decode: int) -> None:
        """Other numbers of workers from now on, as a placement has it: new ones start, others drain and end."""
        numbers = {"prefill": prefill, "decode": decode}
        self.config = self.config.model_copy(update={"cluster": self.config.cluster.model_copy(update=numbers)})
        wanted = self._supervise()
        leaving = [self._supervisors.pop(slot) for slot in self._supervisors.keys() - wanted]
        for supervisor in leaving:
            supervisor.stop(self.config.worker.drain_grace_s + STOP_EXTRA_S)

    def replace(self, slot: str, command: tuple[str, ...]) -> None:
        """The slot's worker drains and ends; ``command`` runs there from now on, and in slots that start later."""
        self._supervisors.pop(slot).stop(self.config.worker.drain_grace_s + STOP_EXTRA_S)
        self.command = command
        self._supervise()

    def _supervise(self) -> set[str]:
        """Start what is missing of the config's slots; their names."""
        url, model = self.config.redis.url, self.config.worker.model
        plans = worker_plans(self.config, model, url, self.folder / "slots", self.folder / "logs")
        for plan in plans:
            if plan.slot not in self._supervisors:
                supervisor = HostSupervisor(msgspec.structs.replace(plan, command=self.command))
                self._supervisors[plan.slot] = supervisor
                supervisor.start()
        return {plan.slot for plan in plans}

    def _up(self) -> None:
        url = self._redis.start().url
        redis = self.config.redis.model_copy(update={"url": url})
        worker = self.config.worker.model_copy(update={"model": resolve_model(self.config)})
        self.config = self.config.model_copy(update={"redis": redis, "worker": worker})
        (self.folder / "slots").mkdir()
        self._supervise()
        self.start_router()
        self._await_ready()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + UP_S
        while not (self.workers_ready() == len(self._supervisors) and self.answers()):
            self._require_no_failure()
            if time.monotonic() > deadline:
                raise StartupError(f"the cluster did not come up within {UP_S:g} s: {self._last_words()}")
            time.sleep(LOOK_S)

    def _require_no_failure(self) -> None:
        for supervisor in self._supervisors.values():
            status = supervisor.status()
            if status.state == "failed" and status.error is not None:
                raise from_info(status.error)
        if self.router is None or self.router.poll() is not None:
            raise StartupError(f"the router ended as it came up: {self.log('router')}")

    def _last_words(self) -> str:
        return "; ".join(f"{name}: {self.log(name, 300).strip()}" for name in ("router", *self.slots))


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(ROUTER_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
