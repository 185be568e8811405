"""A whole cluster of real processes without Ray: Redis, worker hosts under their supervisors, one router.

What `baton serve` starts, less the placement; so that a test costs seconds, and can kill what it likes.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import httpx
import msgspec

from baton.cluster.config import BatonConfig, load_config
from baton.deploy.plans import model_name, resolve_model, worker_plans
from baton.deploy.processes import end_sessions
from baton.deploy.redis_server import RedisServer
from baton.deploy.slots import Slot, close_slots, holders
from baton.deploy.supervise import HostSupervisor, host_environment
from baton.protos import convert
from baton.protos.nouns import PoolSnapshot
from baton.protos.v1 import worker_pb2, worker_pb2_grpc

UP_S = 90.0


def wait_for(condition, timeout_s: float = UP_S, what: str = "it"):
    """The first true value of ``condition()``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {timeout_s:g} s")


class Fleet(contextlib.AbstractContextManager):
    """``with Fleet(prefill=2, decode=2, worker={"device": "paced:zero"}) as fleet: httpx.get(fleet.url + …)``."""

    command: tuple[str, ...] = ()  # of the hosts; empty: the real one

    def __init__(self, prefill: int = 1, decode: int = 1, colocated: bool = False, **sections):
        self._scratch = tempfile.TemporaryDirectory(prefix="bf-")
        self.folder = Path(self._scratch.name)
        port, grpc_port = _free_ports(2)
        flags = {
            "cluster": {"prefill": prefill, "decode": decode, "colocated": colocated},
            "router": {"port": port, "grpc_port": grpc_port} | sections.pop("router", {}),
            **sections,
        }
        self.config: BatonConfig = load_config(flags=flags, search=self.folder)
        self.model = model_name(self.config, resolve_model(self.config))
        self.url = f"http://127.0.0.1:{port}"
        self.grpc = f"127.0.0.1:{grpc_port}"
        self._redis = RedisServer(self.folder / "redis")
        self._supervisors: list[HostSupervisor] = []
        self.router: subprocess.Popen[bytes] | None = None
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> "Fleet":
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        close_slots(self.folder / "slots")
        for channel in self._channels.values():
            channel.close()
        if self.router:
            self.router.send_signal(signal.SIGTERM)
        end_sessions(holders(self.folder / "slots").values(), 2.0)
        for supervisor in self._supervisors:
            supervisor.stop(0.0)
        if self.router:
            try:
                self.router.wait(3)
            except subprocess.TimeoutExpired:
                self.router.kill()
                self.router.wait()
        self._redis.stop()
        self._scratch.cleanup()

    def _up(self) -> None:
        url = self._redis.start().url
        redis = self.config.redis.model_copy(update={"url": url})
        worker = self.config.worker.model_copy(update={"model": resolve_model(self.config)})
        self.config = self.config.model_copy(update={"redis": redis, "worker": worker})
        slots = self.folder / "slots"
        slots.mkdir()
        for plan in worker_plans(self.config, worker.model, url, slots, self.folder / "logs"):
            plan = msgspec.structs.replace(plan, command=self.command)
            self._supervisors.append(HostSupervisor(plan))
            self._supervisors[-1].start()
        self.start_router()
        wait_for(self._is_ready, what="a ready cluster")

    def start_router(self) -> None:
        """The router's process; also after a test killed it."""
        path = self.folder / "config.json"
        path.write_text(self.config.model_dump_json())
        log = open(self.folder / "router.log", "ab")  # noqa: SIM115 (the child's for its life)
        self.router = subprocess.Popen(
            [sys.executable, "-m", "baton.deploy.router_host", "--config", str(path)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=host_environment(),
        )  # fmt: skip

    def _is_ready(self) -> bool:
        for supervisor in self._supervisors:
            status = supervisor.status()
            assert status.state != "failed", status
        assert self.router is not None
        assert self.router.poll() is None, self.log("router")
        return self.workers_ready() == len(self._supervisors) and self.answers()

    def answers(self) -> bool:
        """Whether /ready says so, for all workers that were planned."""
        try:
            return httpx.get(self.url + "/ready", timeout=2).status_code == 200 and self.reachable() == len(
                self._supervisors
            )
        except httpx.HTTPError:
            return False

    def reachable(self) -> int:
        """Workers that the router can reach, by its own metric."""
        lines = httpx.get(self.url + "/metrics", timeout=5).text.splitlines()
        return round(sum(float(line.split()[-1]) for line in lines if line.startswith("baton_workers{")))

    def workers_ready(self) -> int:
        """Hosts whose slot record says ready."""
        return sum(s.status().state == "ready" for s in self._supervisors)

    @property
    def slots(self) -> list[str]:
        """Names of all slots."""
        return [p.name.removesuffix(".json") for p in sorted((self.folder / "slots").glob("*.json"))]

    def record(self, slot: str):
        """What the slot's present host says of itself."""
        return Slot(self.folder / "slots", slot).read()

    def kill(self, slot: str, part: str) -> int:
        """SIGKILL to the "engine" or "io" process of a slot; its pid."""
        record = self.record(slot)
        pid = record.engine_pid if part == "engine" else record.pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def log(self, name: str) -> str:
        """The end of a process's log."""
        for path in (self.folder / f"{name}.log", self.folder / "logs" / f"{name}.log"):
            if path.exists():
                return path.read_text(errors="replace")[-3000:]
        return ""

    def snapshot(self, slot: str) -> PoolSnapshot:
        """The worker's pool, counted now."""
        address = self.record(slot).address
        channel = self._channels.setdefault(address, grpc.insecure_channel(address))
        reply = worker_pb2_grpc.WorkerStub(channel).Snapshot(worker_pb2.SnapshotRequest(), timeout=10)
        return convert.snapshot_from_pb(reply)

    def wait_for_baseline(self, timeout_s: float = 10.0) -> dict[str, PoolSnapshot]:
        """Every pool of every worker, once all are at baseline; fails when they don't get there."""
        found: dict[str, PoolSnapshot] = {}

        def calm() -> bool:
            found.update({slot: self.snapshot(slot) for slot in self.slots})
            return all(s.at_baseline and not s.running and not s.waiting for s in found.values())

        try:
            wait_for(calm, timeout_s, "baseline")
        except AssertionError:
            raise AssertionError(f"pages are still held: {found}") from None
        assert all(s.free + s.cached == s.pages for s in found.values()), found
        assert not any(s.leases_swept for s in found.values()), found
        return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [p.getsockname()[1] for p in probes]


async def complete(client: httpx.AsyncClient, url: str, prompt: list[int], **fields) -> list[int]:
    """Token ids of one streamed completion, in order; fails on any error line."""
    body = {"prompt": prompt, "stream": True, "return_token_ids": True, "ignore_eos": True} | fields
    ids: list[int] = []
    async with client.stream("POST", url + "/v1/completions", json=body) as response:
        assert response.status_code == 200, (response.status_code, await response.aread())
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    ids += choice.get("token_ids") or []
    return ids
