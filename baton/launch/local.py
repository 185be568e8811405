"""A whole cluster on this machine: Redis, router, Ray and its workers come up together and go down together.

Knows nothing of requests. The router comes up while Ray does; a part that dies later is started again, and
the others go on. Every process is a child of this one or holds a slot's lock, so that none can be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from baton.cluster.config import BatonConfig, ClusterConfig
from baton.cluster.redis_url import shown
from baton.cluster.roles import forget_roles
from baton.cluster.scale import Scale, forget_scale
from baton.cluster.served_model import model_name
from baton.launch.plans import slots_of, worker_plans
from baton.launch.ports import dialled, with_ports
from baton.launch.ray.app import PlacementSpec
from baton.launch.ray.host import Report
from baton.launch.redis_server import RedisServer, check_redis
from baton.launch.run_files import RunFiles
from baton.launch.scaling import watch_scale
from baton.launch.servable import servable_model
from baton.launch.supervise import HostPlan, SlotStatus
from baton.process.children import Child, python
from baton.process.processes import adopt_orphans, end_sessions, kill_session, reap_orphans
from baton.process.security import probing_context, ray_environment
from baton.protos.errors import BatonError, ConfigError, StartupError, from_info
from baton.worker.slots import close_slots, holders

HOST_GRACE_S = 1.5
RAY_GRACE_S = 3.5
REAP_S = 0.5
Show = Callable[[str, str], None]


class LocalCluster:
    """``async with LocalCluster(config, show)``: up when entered, gone when left. ``show(part, what happened)``."""

    def __init__(self, config: BatonConfig, show: Show) -> None:
        self.model = servable_model(config)
        if config.ray.address and not config.redis.url:
            raise ConfigError("workers on other nodes need a Redis they can reach: pass --redis URL", "redis.url")
        self.config = with_ports(config)
        self.files = RunFiles(config)
        scheme = "https" if config.tls.enabled else "http"
        self.url = f"{scheme}://{dialled(config.router.host)}:{self.config.router.port}"
        self._tls = probing_context(config)
        self.name = model_name(config, self.model)
        self.slots: dict[str, SlotStatus] = {}
        self._show = show
        self._redis = None if config.redis.url else RedisServer(self.files.redis)
        self._children: dict[str, Child] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] | None = None
        self._changed = asyncio.Event()
        self._is_up = False

    async def __aenter__(self) -> LocalCluster:
        try:
            await self._up()
        except BaseException:
            await self.down()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.down()

    @property
    def pids(self) -> dict[str, int]:
        """part -> pid, of what runs now."""
        found = {name: child.pid for name, child in self._children.items() if child.pid}
        if self._redis and self._redis.pid:
            found["redis"] = self._redis.pid
        return found | holders(self.files.slots)

    async def down(self) -> None:
        """End every process; what doesn't listen is killed. Less than 5 s."""
        close_slots(self.files.slots)
        await _cancel(self._tasks)
        hosts = holders(self.files.slots).values()
        await asyncio.gather(
            *(child.stop(RAY_GRACE_S) for child in self._children.values()),
            asyncio.to_thread(end_sessions, hosts, HOST_GRACE_S),
        )
        await asyncio.to_thread(end_sessions, holders(self.files.slots).values(), 0.0)  # started meanwhile
        if self._redis:
            self._redis.stop()
        self._reap()
        self.files.tidy()

    def kill(self) -> None:
        """SIGKILL everything, now."""
        close_slots(self.files.slots)
        for pid in self.pids.values():
            kill_session(pid)
        self._reap()

    # ---- up --------------------------------------------------------------------------------------------

    async def _up(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        adopt_orphans()
        self._tasks.append(asyncio.create_task(self._keep_reaping()))
        self._start_redis()
        await self._start("router", python("baton.router_host.main", "--config", self._write_config()))
        await self._start("ray", python("baton.launch.ray.host", "--spec", self._write_placement()), pipes=True)
        self._keep("router", _nothing)
        self._keep("ray", self._read_reports)
        if self._redis:
            self._tasks.append(asyncio.create_task(self._keep_redis(self._redis)))
        redis, namespace = self.config.redis.url, self.config.cluster.namespace
        self._tasks.append(asyncio.create_task(watch_scale(redis, namespace, self._scale)))
        await self._or_failure(self._until_ready(), self.config.cluster.start_timeout_s)
        self._is_up = True

    def _start_redis(self) -> None:
        if self._redis is None:
            check_redis(self.config.redis.url)
            forget_roles(self.config.redis.url, self.config.cluster.namespace)
            forget_scale(self.config.redis.url, self.config.cluster.namespace)
            self._show("redis", shown(self.config.redis.url))
            return
        url = self._redis.start().url
        self.config = self.config.model_copy(update={"redis": self.config.redis.model_copy(update={"url": url})})
        self._show("redis", f"private, {url}")

    async def _start(self, name: str, command: list[str], pipes: bool = False) -> None:
        self._children[name] = Child(command, self.files.logs / f"{name}.log", pipes)
        await self._children[name].start()

    def _keep(self, name: str, started: Callable[[asyncio.subprocess.Process], Coroutine[Any, Any, None]]) -> None:
        def note(what: str) -> None:
            if self._is_up:
                self._show(name, f"{what}; starting it again")
            else:
                self._trouble(name, StartupError(f"{name} {what}: {self._children[name].last_words()}"))

        self._tasks.append(asyncio.create_task(self._children[name].keep(note, started), name=name))

    async def _keep_redis(self, server: RedisServer) -> None:
        while True:
            await asyncio.sleep(0.5)
            if server.pid is None:
                self._show("redis", "ended; starting it again")
                with contextlib.suppress(StartupError, OSError):
                    server.start()

    async def _keep_reaping(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            with contextlib.suppress(OSError):
                self._reap()

    def _reap(self) -> None:
        own = {child.pid for child in self._children.values() if child.pid}
        reap_orphans(own | ({self._redis.pid} if self._redis and self._redis.pid else set()))

    async def _read_reports(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            report = msgspec.json.decode(line, type=Report)
            if report.error is not None:
                self._trouble("ray", from_info(report.error))
            elif report.slot is not None:
                self._take(report.slot)
            else:
                self._show("ray", f"at {report.address}")

    def _take(self, status: SlotStatus) -> None:
        before = self.slots.get(status.slot)
        self.slots[status.slot] = status
        self._changed.set()
        if status.state == "failed" and status.error is not None:
            self._trouble(status.slot, from_info(status.error))
        elif before is None or (before.state, before.pid, before.role) != (status.state, status.pid, status.role):
            self._show(status.slot, _said(status))

    def _trouble(self, part: str, error: BatonError) -> None:
        """Fatal while coming up; later a part's trouble is shown and the others go on."""
        assert self._failed is not None
        if self._is_up:
            self._show(part, error.message)
        elif not self._failed.done():
            self._failed.set_exception(error)

    async def _until_ready(self) -> None:
        names = {slot for slot, _ in slots_of(self.config)}
        while {name for name, status in self.slots.items() if status.state == "ready"} != names:
            self._changed.clear()
            await self._changed.wait()
        while not await asyncio.to_thread(_answers, f"{self.url}/ready", self._tls):  # noqa: ASYNC110 (another process's state)
            await asyncio.sleep(0.1)
        self._show("router", f"ready at {self.url}")

    async def _or_failure(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        assert self._failed is not None
        task = asyncio.create_task(work)
        done, _ = await asyncio.wait({task, self._failed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task not in done:
            await _cancel([task])
        for finished in done:
            finished.result()
        if not done:
            states = ", ".join(f"{s.slot} {s.state}" for s in self.slots.values()) or "no worker was placed"
            raise StartupError(f"not ready after {timeout_s:g} s ({states}); logs in {self.files.logs}")

    async def _scale(self, asked: Scale) -> None:
        """Other numbers of workers from now on; Ray's process places and drains."""
        numbers = {"prefill": asked.prefill, "decode": asked.decode}
        try:
            cluster = ClusterConfig.model_validate(self.config.cluster.model_dump() | numbers)
            plans = self._plans(self.config.model_copy(update={"cluster": cluster}))
        except (ValueError, BatonError) as error:
            self._show("scale", f"{numbers} can't be: {error}")
            return
        self.config = self.config.model_copy(update={"cluster": cluster})
        self._write_placement()  # for a Ray that is started again
        self._show("scale", f"prefill {asked.prefill}, decode {asked.decode}")
        process = self._children["ray"].process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.write(msgspec.json.encode(plans) + b"\n")
                await process.stdin.drain()

    def _plans(self, config: BatonConfig) -> list[HostPlan]:
        return worker_plans(config, self.model, config.redis.url, self.files.slots, self.files.logs)

    def _write_config(self) -> str:
        section = self.config.worker.model_copy(update={"model": self.model})
        self.files.config.write_text(self.config.model_copy(update={"worker": section}).model_dump_json(indent=1))
        return str(self.files.config)

    def _write_placement(self) -> str:
        config = self.config
        spec = PlacementSpec(
            tuple(self._plans(config)), str(self.files.ray), config.ray.address, config.ray.auth_mode,
            config.ray.object_store_bytes, config.worker.device == "cuda", ray_environment(config),
            config.ray.placement, config.worker.drain_grace_s,
        )  # fmt: skip
        self.files.placement.write_bytes(msgspec.json.encode(spec))
        return str(self.files.placement)


async def _nothing(_: asyncio.subprocess.Process) -> None:
    return None


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _said(status: SlotStatus) -> str:
    if status.state == "ready":
        role = f" as a {status.role} worker" if status.role and not status.slot.startswith(status.role) else ""
        adopted = " (adopted)" if status.adopted else ""
        return f"ready{role} at {status.address}, pid {status.pid}{adopted}"
    return f"{status.state}: {status.error.message}" if status.error else status.state


def _answers(url: str, context: ssl.SSLContext | None) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1, context=context) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
