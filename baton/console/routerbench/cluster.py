"""A cluster to measure a router before: Redis, paced worker hosts, one router process, its CPU time and memory.

Knows nothing of what is measured. Every process is real; Ray isn't there, as it is on no request's path.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from baton.cluster.config import BatonConfig, load_config
from baton.deploy.plans import model_name, resolve_model, worker_plans
from baton.deploy.processes import end_sessions
from baton.deploy.redis_server import RedisServer
from baton.deploy.slots import Slot, close_slots, holders
from baton.deploy.supervise import HostSupervisor, host_environment
from baton.protos.errors import StartupError

UP_S = 30.0
PROFILE = """
about = "{about}"
kv_bytes_per_token = 64
model_kv_bytes_per_token = 64
pages = {pages}
vocab_size = 32000
max_model_len = 131072
prefill_chunk = {chunk}

[step]
fixed = {fixed}
prefill_token = {prefill}
prefill_pair = 0.0
decode_sequence = 0.0
decode_context_token = 0.0

[transfer]
fixed = 0.0
per_byte = 0.0
"""


class BenchCluster(contextlib.AbstractContextManager["BenchCluster"]):
    """``with BenchCluster(decode=1) as c: … c.url …``. ``fixed`` and ``prefill_s``: seconds per step and token."""

    def __init__(
        self, decode: int = 1, prefill: int = 0, fixed: float = 0.0, prefill_s: float = 0.0, pages: int = 16384,
        chunk: int = 2048, **router: Any,
    ) -> None:  # fmt: skip
        self._scratch = tempfile.TemporaryDirectory(prefix="bb-")
        self._folder = Path(self._scratch.name)
        profile = self._folder / "bench.toml"
        text = PROFILE.format(about="a benchmark's", pages=pages, fixed=fixed, prefill=prefill_s, chunk=chunk)
        profile.write_text(text)
        port, grpc_port = _free_ports(2)
        cluster = {"prefill": prefill, "decode": decode, "colocated": prefill == 0}
        flags = {
            "router": {"port": port, "grpc_port": grpc_port} | router,
            "cluster": cluster,
            "worker": {"device": f"paced:{profile}", "max_batch": 256},
        }
        self.config: BatonConfig = load_config(flags=flags, search=self._folder)
        self.model = model_name(self.config, resolve_model(self.config))
        self.host, self.port = "127.0.0.1", port
        self.url = f"http://{self.host}:{port}"
        self._redis = RedisServer(self._folder / "redis")
        self._supervisors: list[HostSupervisor] = []
        self._router: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> BenchCluster:
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        close_slots(self._folder / "slots")
        if self._router:
            self._router.send_signal(signal.SIGTERM)
        end_sessions(holders(self._folder / "slots").values(), 1.0)
        for supervisor in self._supervisors:
            supervisor.stop(0.0)
        if self._router:
            try:
                self._router.wait(3)
            except subprocess.TimeoutExpired:
                self._router.kill()
                self._router.wait()
        self._redis.stop()
        self._scratch.cleanup()

    # ---- what is read of it --------------------------------------------------------------------------

    @property
    def worker_address(self) -> str:
        """Of the first decode worker."""
        record = Slot(self._folder / "slots", "decode-0").read()
        assert record is not None
        return record.address

    def cpu_seconds(self) -> float:
        """User and system time of the router's process so far."""
        fields = self._stat("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Of the router's process, now."""
        return int(self._stat("statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _stat(self, name: str) -> str:
        assert self._router is not None
        return Path(f"/proc/{self._router.pid}/{name}").read_text()

    # ---- up ------------------------------------------------------------------------------------------

    def _up(self) -> None:
        redis = self.config.redis.model_copy(update={"url": self._redis.start().url})
        worker = self.config.worker.model_copy(update={"model": resolve_model(self.config)})
        self.config = self.config.model_copy(update={"redis": redis, "worker": worker})
        slots = self._folder / "slots"
        slots.mkdir()
        for plan in worker_plans(self.config, worker.model, redis.url, slots, self._folder / "logs"):
            self._supervisors.append(HostSupervisor(plan))
            self._supervisors[-1].start()
        path = self._folder / "config.json"
        path.write_text(self.config.model_dump_json())
        with open(self._folder / "router.log", "ab") as log:
            self._router = subprocess.Popen(
                [sys.executable, "-m", "baton.deploy.router_host", "--config", str(path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=host_environment(),
            )  # fmt: skip
        deadline = time.monotonic() + UP_S
        while not self._ready():
            if time.monotonic() > deadline or self._router.poll() is not None:
                raise StartupError(f"the benchmark's cluster did not come up: {self._last_words()}")
            time.sleep(0.05)

    def _last_words(self) -> str:
        logs = [self._folder / "router.log", *sorted((self._folder / "logs").glob("*.log"))]
        return "; ".join(f"{log.name}: {log.read_text(errors='replace')[-300:].strip()}" for log in logs)

    def _ready(self) -> bool:
        if any(s.status().state != "ready" for s in self._supervisors):
            return False
        try:
            with urllib.request.urlopen(self.url + "/metrics", timeout=2) as response:
                lines = response.read().decode().splitlines()
        except (urllib.error.URLError, OSError):
            return False
        reachable = sum(float(line.split()[-1]) for line in lines if line.startswith("baton_workers{"))
        return round(reachable) == len(self._supervisors)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
