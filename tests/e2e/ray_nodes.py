"""Several Ray nodes on this machine, a `baton serve` among them, and a load whose every answer is checked.

A node that dies takes its raylet, its actors, and the hosts and engines that they started along.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx

from baton.launch.redis_server import RedisServer
from baton.process.children import child_environment
from baton.process.processes import kill_session, session_members
from baton.worker.slots import holders
from tests.e2e.fleet import complete
from tests.e2e.paced import Oracle, slow_profile

QUIET = {
    "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0", "RAY_enable_metrics_collection": "0",
    "RAY_kill_child_processes_on_worker_exit": "0",
    # a dead node is known after some 3 s instead of 20: docs/ray.md tells operators the same
    "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3", "RAY_health_check_initial_delay_ms": "1000",
}  # fmt: skip
STORE = 80 << 20
PORT, GRPC = 18433, 18434
TLS_ENV = "BATON_TEST_TLS"
UP_S = 120.0


class Nodes:
    """The Ray cluster and, from ``serve_with`` on, a `baton serve` that joined it.

    With $BATON_TEST_TLS (a folder as of `tls.dir`) Ray and the cluster encrypt. Ray's variables must be set for
    that before this process imports ray.
    """

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        os.environ.update(QUIET)
        self._certificates = certificates = os.environ.get(TLS_ENV, "")
        self.folder, self.url, self.verify = folder, f"http://127.0.0.1:{PORT}", ssl.create_default_context()
        if certificates:
            self.url = f"https://127.0.0.1:{PORT}"
            self.verify = ssl.create_default_context(cafile=f"{certificates}/ca.crt")
        self.profile = slow_profile(folder, fixed=0.02)
        self.redis = RedisServer(folder / "redis").start()
        head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
        self.ray = Cluster(initialize_head=True, head_node_args=head)
        self._log = open(folder / "serve.log", "ab")  # noqa: SIM115 (the child's for its life)
        self.serve: subprocess.Popen[bytes] | None = None
        self.by_role: dict[str, list[Any]] = {}
        self.named: dict[str, Any] = {}

    def add(self, room: dict[str, float], fabric: str = "one", **labels: str):
        """A node that offers ``room``."""
        labels = {"baton/fabric": fabric, **labels}
        return self.ray.add_node(num_cpus=1, resources=room, labels=labels, object_store_memory=STORE)

    def serve_with(self, *arguments: str) -> None:
        """Starts `baton serve` with ``arguments``; wait with ``until`` for its workers."""
        command = [
            sys.executable, "-m", "baton", "serve", "--device", f"paced:{self.profile}", "--ray-address",
            self.ray.address, "--redis", self.redis.url, "--port", str(PORT), "--grpc-port", str(GRPC),
            "--run-dir", str(self.folder / "run"), *arguments,
        ]  # fmt: skip
        command += ["--tls", self._certificates] if self._certificates else []
        settings = {
            "BATON_ROUTER__LOCAL_PREFILL_MAX_TOKENS": "0", "BATON_RAY__AUTH_MODE": "disabled",
            "BATON_WORKER__DRAIN_GRACE_S": "5",
        }  # fmt: skip
        self.serve = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            env={**child_environment(), **settings}, start_new_session=True,
        )  # fmt: skip

    def require_secured(self) -> None:
        """Checks that Ray's head shows its certificate, if the cluster is to encrypt."""
        if not self._certificates:
            return
        host, _, port = self.ray.address.rpartition(":")
        context = ssl.create_default_context(cafile=f"{self._certificates}/ca.crt")
        context.load_cert_chain(f"{self._certificates}/ray.crt", f"{self._certificates}/ray.key")
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            assert secured.version() in ("TLSv1.2", "TLSv1.3")

    def close(self) -> None:
        """Ends all processes."""
        if self.serve is not None:
            self.serve.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.serve.wait(30)
            for pid in self.hosts().values():
                kill_session(pid)
            kill_session(self.serve.pid)
        self.ray.shutdown()
        self.redis.stop()
        self._log.close()

    def hosts(self) -> dict[str, int]:
        """slot -> pid of its host."""
        return holders(self.folder / "run" / "slots")

    def hosts_of(self, node) -> dict[str, int]:
        """Returns the host processes, by slot, that a node's actors started."""
        raylets = {info.process.pid for info in node.all_processes["raylet"]}
        return {slot: pid for slot, pid in self.hosts().items() if raylets & set(ancestors(pid))}

    def kill_raylet(self, node) -> None:
        """Ray's part of the node dies; what its actors started lives on."""
        for info in node.all_processes["raylet"]:
            info.process.kill()

    def kill(self, node) -> list[str]:
        """The node dies as a machine does; the slots that were on it."""
        found = self.hosts_of(node)
        actors = {parent_of(pid) for pid in found.values()}
        self.ray.remove_node(node, allow_graceful=False)
        for pid in actors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in found.values():
            for member in session_members(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
        return sorted(found)

    async def until(self, workers: int, what: str) -> float:
        """Seconds until the router reaches exactly ``workers``."""
        begun = time.monotonic()
        async with httpx.AsyncClient(timeout=30, verify=self.verify) as client:
            while time.monotonic() - begun < UP_S:
                assert self.serve is not None and self.serve.poll() is None, self.log()  # noqa: PT018
                with contextlib.suppress(httpx.HTTPError):
                    text = (await client.get(self.url + "/metrics")).text
                    lines = [line for line in text.splitlines() if line.startswith("baton_workers{")]
                    if round(sum(float(line.split()[-1]) for line in lines)) == workers:
                        return time.monotonic() - begun
                await asyncio.sleep(0.1)
        raise AssertionError(f"{what} did not happen: {self.log()}")

    def log(self) -> str:
        """The end of what was printed, and of Ray's process."""
        ours = (self.folder / "serve.log").read_text(errors="replace")[-2500:]
        ray = self.folder / "run" / "logs" / "ray.log"
        return ours + (ray.read_text(errors="replace")[-2500:] if ray.exists() else "")

    async def scale(self, *numbers: str) -> str:
        """Runs `baton scale` and returns its output."""
        command = [sys.executable, "-m", "baton", "scale", *numbers, "--redis", self.redis.url]
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=child_environment()
        )
        said, _ = await child.communicate()
        assert child.returncode == 0, said.decode() + self.log()
        return said.decode().strip()


def parent_of(pid: int) -> int:
    """Returns the parent of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def ancestors(pid: int) -> Iterator[int]:
    """Parents, up to init."""
    while (pid := parent_of(pid)) > 1:
        yield pid


@contextlib.contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """Yields a Ray cluster with a head node, all of which ends with the block."""
    with tempfile.TemporaryDirectory(prefix="br-") as name:
        made = Nodes(Path(name))
        try:
            yield made
        finally:
            made.close()


class Load:
    """Requests without a pause, each held against the oracle."""

    def __init__(self, nodes: Nodes, streams: int = 6) -> None:
        self.outcomes: Counter[str] = Counter()
        self._nodes, self._streams, self._oracle = nodes, streams, Oracle(nodes.profile)
        self._stop = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Load"]:
        """While the block runs; what is in flight then is waited for."""
        async with httpx.AsyncClient(timeout=90, limits=httpx.Limits(max_connections=64)) as client:
            tasks = [asyncio.create_task(self._stream(client, i)) for i in range(self._streams)]
            try:
                yield self
            finally:
                self._stop.set()
                await asyncio.gather(*tasks)

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        seed = number * 10_000
        while not self._stop.is_set():
            seed += 1
            prompt = self._oracle.prompt(seed, 64 + 37 * (seed % 9))
            try:
                got = await complete(client, self._nodes.url, prompt, max_tokens=24, temperature=0)
            except (httpx.HTTPError, AssertionError, json.JSONDecodeError) as error:
                self.outcomes[f"failed: {type(error).__name__} {str(error)[:200]}"] += 1
                continue
            self.outcomes["right" if got == self._oracle.answer(prompt, 24) else "WRONG"] += 1


def only_right(load: Load) -> None:
    assert set(load.outcomes) == {"right"}, load.outcomes
