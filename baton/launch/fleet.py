"""A whole cluster of real processes without Ray: Redis, worker hosts under their supervisors, one router.

Tests and benchmarks have one within a second, may kill any process in it, and leave nothing behind, however they
end. Blocking. Knows nothing of what is asked of the cluster.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from baton.cluster.config import load_config
from baton.launch.cluster_run import ClusterRun, failure_of
from baton.launch.kernels import compilation
from baton.launch.ports import free_ports
from baton.launch.supervise import HostPlan, HostProcess, HostSupervisor, SlotStatus, start_host
from baton.process.children import child_environment
from baton.process.processes import die_with_parent
from baton.protos.errors import StartupError
from baton.worker.slots import SlotRecord, WorkerSlot

UP_S = 90.0  # seconds that a cluster may take to come up, because some load a model's weights
GRACE_S, ROUTER_GRACE_S = 2.0, 3.0  # seconds to end in order, until hosts and the router are killed
LOOK_S = 0.02  # seconds between two looks at whether a process is ready
STOP_EXTRA_S = 3.0  # beyond a host's own grace, until its session is killed


class Fleet(ClusterRun, contextlib.AbstractContextManager["Fleet"]):
    """Runs a cluster while entered: ``with Fleet(cluster={"decode": 2}, worker={"device": "paced:zero"}) as fleet:
    … fleet.url``.

    Arguments are sections of the config; free ports are chosen. Enter it from the main thread: Redis and the router
    end with the thread that started them, worker hosts with this process.
    """

    command: tuple[str, ...] = ()  # what runs in each slot; empty: a worker host
    router_command: tuple[str, ...] = (sys.executable, "-m", "baton.router_host.main")

    def __init__(self, **sections: Mapping[str, object]) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="bf-")  # short: unix sockets end at 107 bytes
        self.folder = Path(self._scratch.name)
        port, grpc_port = free_ports(2)  # at once: a port of several router processes may not be 0
        router = {"port": port, "grpc_port": grpc_port} | dict(sections.pop("router", {}))
        super().__init__(load_config(flags={"router": router, **sections}, search=self.folder), self.folder)
        self.router: subprocess.Popen[bytes] | None = None
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
        """Ends every process and deletes the run's folder; processes that outlast their grace are killed."""
        self.close_slots()
        if self.router:
            self.router.send_signal(signal.SIGTERM)
        self.end_hosts(GRACE_S)
        for supervisor in self._supervisors.values():
            supervisor.stop(0.0)
        if self.router:
            _end(self.router)
        self.stop_redis()
        self._scratch.cleanup()

    # ---- what is seen of it --------------------------------------------------------------------------

    @property
    def slots(self) -> list[str]:
        """Returns the sorted names of all slots in which a worker host has written its record."""
        return [p.stem for p in sorted(self.files.slots.glob("*.json"))]

    def record(self, slot: str) -> SlotRecord:
        """Returns the record that the slot's last host wrote: state, pid, address.

        Raises StartupError if there is none.
        """
        record = WorkerSlot(self.files.slots, slot).read()
        if record is None:
            raise StartupError(f"no host of {slot} has said anything yet")
        return record

    def workers_ready(self) -> int:
        """Returns how many worker hosts say that they are ready."""
        return sum(status.state == "ready" for status in self._statuses())

    def answers(self) -> bool:
        """Returns whether the router is ready and reaches every planned worker."""
        with contextlib.suppress(OSError):
            return self.is_ready() and self.reachable() == len(self._supervisors)
        return False

    def log(self, name: str, size: int = 3000) -> str:
        """Returns the last ``size`` characters of the log of a slot, or of "router"; "" if there is none."""
        path = self.files.logs / f"{name}.log"
        return path.read_text(errors="replace")[-size:] if path.exists() else ""

    # ---- up ------------------------------------------------------------------------------------------

    def start_router(self) -> None:
        """Starts the router's process, also again after it was killed."""
        with open(self.files.logs / "router.log", "ab") as log:
            self.router = self.run_router([*self.router_command, "--config", self.write_config()], log)

    def run_router(self, command: list[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        """Starts the router's ``command`` with its output in ``log``; returns the process.

        Subclasses may override it.
        """
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=child_environment(),
            preexec_fn=die_with_parent,
        )  # fmt: skip

    def run_host(self, command: list[str], log: BinaryIO) -> HostProcess:
        """Starts a worker host's ``command`` with its output in ``log``; returns the process.

        Subclasses may override it.
        """
        return start_host(command, log)

    def scale(self, prefill: int, decode: int) -> None:
        """Changes the numbers of workers: starts new ones, drains and ends those in excess, and waits for their
        end.
        """
        plans = self.resize(prefill, decode)
        self._supervise(plans)
        wanted = {plan.slot for plan in plans}
        leaving = [self._supervisors.pop(slot) for slot in self._supervisors.keys() - wanted]
        for supervisor in leaving:
            supervisor.stop(self.config.worker.drain_grace_s + STOP_EXTRA_S)

    def replace(self, slot: str, command: tuple[str, ...]) -> None:
        """Drains and ends the slot's worker; ``command`` then runs in that slot, and in slots that start later."""
        self._supervisors.pop(slot).stop(self.config.worker.drain_grace_s + STOP_EXTRA_S)
        self.command = command
        self._supervise(self.plans())

    def _supervise(self, plans: list[HostPlan]) -> None:
        """Starts a supervisor for each slot that has none."""
        for plan in plans:
            if plan.slot not in self._supervisors:
                supervisor = HostSupervisor(msgspec.structs.replace(plan, command=self.command), self.run_host)
                self._supervisors[plan.slot] = supervisor
                supervisor.start()

    def _up(self) -> None:
        if (command := compilation(self.config)) is not None:  # in nobody's time
            subprocess.run(command, env=child_environment(), check=False)
        self.start_redis()
        self._supervise(self.plans())
        self.start_router()
        self._await_ready()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + UP_S
        while not (self.has_all(statuses := self._statuses()) and self.answers()):
            for status in statuses:
                if (failure := failure_of(status)) is not None:
                    raise failure
            if self.router is None or self.router.poll() is not None:
                raise StartupError(f"the router ended as it came up: {self.log('router')}")
            if time.monotonic() > deadline:
                raise StartupError(f"{self.late(UP_S, statuses)}: {self._last_words()}")
            time.sleep(LOOK_S)

    def _statuses(self) -> list[SlotStatus]:
        return [supervisor.status() for supervisor in self._supervisors.values()]

    def _last_words(self) -> str:
        return "; ".join(f"{name}: {self.log(name, 300).strip()}" for name in ("router", *self.slots))


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(ROUTER_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
