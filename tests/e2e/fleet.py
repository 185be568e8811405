"""The cluster that end-to-end tests run against: ``launch.fleet`` with what tests ask of it, and can do to it."""

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from subprocess import Popen
from typing import BinaryIO

import grpc
import httpx

from baton.cluster.config import BatonConfig
from baton.cluster.membership import PolledRoster, WorkerEntry, connect
from baton.cluster.prefix_index import PrefixIndex
from baton.cluster.served_model import DEMO
from baton.kv.layout import prefix
from baton.launch import fleet
from baton.launch.supervise import HostProcess
from baton.process.loop_watch import STOOD_STILL
from baton.protos import convert
from baton.protos.nouns import PoolSnapshot
from baton.protos.v1 import worker_pb2, worker_pb2_grpc
from tests import warm

UP_S = fleet.UP_S
SLOW_S = 60.0  # for one answer of a process of a busy machine
LATE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)  # a worker that isn't back yet, or busy
DRAFT = str(DEMO.parent / "demo-draft")  # the smaller of the models that are here
HUNG = "Timeout (0:"  # how faulthandler begins, in the log of a process that was ended because it hung


def wait_for(condition, timeout_s: float = UP_S, what: str = "it"):
    """The first true value of ``condition()``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {timeout_s:g} s")


STALL_S = 0.05  # what no client may hold a loop for


class ForkedProcesses:
    """Has a ``launch.fleet`` start its processes as forks of a warm one: name it before the fleet's own class."""

    config: BatonConfig

    def run_host(self, command: list[str], log: BinaryIO) -> HostProcess:
        return warm.of(self.config.worker.device).start(command, log) or super().run_host(command, log)

    def run_router(self, command: list[str], log: BinaryIO) -> Popen[bytes]:
        forked = warm.of(self.config.worker.device).start(command, log, session=False)
        return forked or super().run_router(command, log)


class Fleet(ForkedProcesses, fleet.Fleet):
    """``with Fleet(prefill=2, decode=2, worker={"device": "paced:zero"}) as fleet: httpx.get(fleet.url + …)``."""

    def __init__(self, prefill: int = 1, decode: int = 1, colocated: bool = False, **sections):
        cluster = {"prefill": prefill, "decode": decode, "colocated": colocated} | sections.pop("cluster", {})
        telemetry = {"loop_stall_s": STALL_S} | sections.pop("telemetry", {})
        super().__init__(cluster=cluster, telemetry=telemetry, **sections)
        self._channels: dict[str, grpc.Channel] = {}

    def __exit__(self, *exc) -> None:
        stalls = "" if exc[0] else self.stalls()
        super().__exit__(*exc)
        assert not stalls, stalls

    def stalls(self) -> str:
        """Returns the log of the first event loop (of a router or an I/O process) that stood still; "" if none
        did.
        """
        for path in sorted(self.files.logs.glob("*.log")):
            before, found, after = path.read_text(errors="replace").partition(STOOD_STILL)
            if found:
                return f"{path.name}: {before[-200:]}{found}{after[:3000]}"
        return ""

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        super().close()

    def kill(self, slot: str, part: str) -> int:
        """SIGKILL to the "engine" or "io" process of a slot; its pid."""
        record = self.record(slot)
        pid = record.engine_pid if part == "engine" else record.pid
        assert pid, f"{slot} has no {part} now: {record}"  # 0 would be our own process group
        os.kill(pid, signal.SIGKILL)
        return pid

    def reachable(self) -> int:
        """Returns how many workers the router reaches; -1 if it is too busy to say, or gone."""
        with contextlib.suppress(OSError):
            return super().reachable()
        return -1

    def reaches(self, slot: str, incarnation: str) -> bool:
        """Returns whether the router has a link to that incarnation of the slot's worker, not to one before it."""
        url = f"{self.url}/v1/cluster"
        try:
            with urllib.request.urlopen(url, timeout=SLOW_S, context=self._tls) as response:
                workers = json.load(response)["workers"]
        except urllib.error.HTTPError as error:
            return error.code in (401, 403)  # it tells only whoever has a key: nothing else speaks against it
        except OSError:
            return False
        # A router of an older build doesn't say which incarnation it reaches.
        return any(
            w["id"] == slot and w["up"] and w.get("incarnation", incarnation) == incarnation for w in workers
        )

    def wait_for_return(self, slot: str, before: str, timeout_s: float = UP_S) -> float:
        """Until another incarnation than ``before`` serves, to the router's knowledge; when that was."""

        def back() -> bool:
            record = self.record(slot)
            if record.incarnation == before or record.state != "ready":
                return False
            return self.reaches(slot, record.incarnation) and self.reachable() == len(self.slots)

        try:
            wait_for(back, timeout_s, f"{slot} being back")
        except AssertionError as error:
            state = f"{before}; {self.record(slot)}; the router reaches {self.reachable()} of {len(self.slots)}"
            raise AssertionError(f"{error}: {state}\n{self.log(slot)}\n{self.log('router')}") from None
        return time.monotonic()

    def hung(self) -> str:
        """The stacks of the first process that had to be ended because it hung; empty when none did."""
        for path in sorted(self.files.logs.glob("*.log")):
            before, found, after = path.read_text(errors="replace").partition(HUNG)
            if found:
                return f"{path.name}: …{before[-500:]}{found}{after[:4000]}"
        return ""

    def snapshot(self, slot: str) -> PoolSnapshot:
        """The worker's pool, counted now."""
        address = self.record(slot).address
        channel = self._channels.setdefault(address, grpc.insecure_channel(address))
        reply = worker_pb2_grpc.WorkerStub(channel).Snapshot(worker_pb2.SnapshotRequest(), timeout=30)
        return convert.snapshot_from_pb(reply)

    def wait_for_index(self, slot: str, prompt: list[int], tokens: int) -> None:
        """Until the index tells routers that the slot holds ``tokens`` leading ones of ``prompt``."""
        wait_for(lambda: asyncio.run(self._indexed(slot, prompt)) >= tokens, UP_S, f"{slot} in the index")

    async def _indexed(self, slot: str, prompt: list[int]) -> int:
        entry = (await self._roster()).get(slot)
        if entry is None:
            return 0  # its last beat was late
        redis = connect(self.config.redis.url)
        layout = entry.info.layout
        root = prefix.root(entry.info.fingerprint, layout.fidelity)
        hashes = prefix.block_hashes(root, tuple(prompt), layout.block_tokens)
        try:
            held = await PrefixIndex(redis, self.config.cluster.namespace).longest([slot], hashes)
            return held.get(slot, 0) * layout.block_tokens
        finally:
            await redis.aclose()

    def roster(self) -> dict[str, WorkerEntry]:
        """The workers as Redis has them."""
        return asyncio.run(self._roster())

    async def _roster(self) -> dict[str, WorkerEntry]:
        redis = connect(self.config.redis.url)
        try:
            return dict(await PolledRoster(redis, self.config.cluster.namespace).refresh())
        finally:
            await redis.aclose()

    def metric(self, slot: str, name: str) -> float:
        """A metric of the slot's worker, summed over its labels."""
        text = httpx.get(f"http://{self.record(slot).metrics_address}/metrics", timeout=SLOW_S).text
        return sum(float(x.split()[-1]) for x in text.splitlines() if x.startswith((name + "{", name + " ")))

    def wait_for_baseline(self, timeout_s: float = UP_S) -> dict[str, PoolSnapshot]:
        """Returns every pool of every worker, once all are up and at baseline; fails when they don't get there."""
        found: dict[str, PoolSnapshot] = {}

        def calm() -> bool:
            try:
                found.update({slot: self.snapshot(slot) for slot in self.slots})
            except grpc.RpcError as error:
                if error.code() not in LATE:
                    raise
                return False
            return all(s.at_baseline and not s.running and not s.waiting for s in found.values())

        try:
            wait_for(calm, timeout_s, "baseline")
        except AssertionError:
            raise AssertionError(f"pages are still held: {found}") from None
        assert all(s.free + s.cached == s.pages for s in found.values()), found
        assert not any(s.leases_swept for s in found.values()), found
        return found


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
