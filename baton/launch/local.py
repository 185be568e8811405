"""A whole cluster on this machine: Redis, router, Ray and its workers start together and end together.

Knows nothing of requests. The router starts while Ray does; a part that dies later is started again while the
others go on. Every process is a child of this one or holds a slot's lock, so none can be left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial

import msgspec

from baton.cluster.config import BatonConfig
from baton.cluster.scale import ScaleRequest
from baton.launch.cluster_run import ClusterRun, failure_of
from baton.launch.kernels import compilation
from baton.launch.ray.app import PlacementSpec
from baton.launch.ray.host import PlacementReport
from baton.launch.scaling import watch_scale
from baton.launch.supervise import HostPlan, SlotStatus
from baton.process.children import ChildProcess, OnStart, python
from baton.process.processes import adopt_orphans, kill_session, reap_orphans
from baton.process.security import ray_environment
from baton.protos.errors import BatonError, ConfigError, StartupError, from_info
from baton.tasks.lasting import lasting

HOST_GRACE_S = 1.5  # seconds that workers have to end by themselves
RAY_GRACE_S = 3.5  # seconds that Ray's processes have to end by themselves
REAP_S = 0.5  # seconds between two looks for processes that ended
REDIS_LOOK_S = 0.5  # seconds between two looks at whether Redis runs
Show = Callable[[str, str], None]
Work = Coroutine[object, None, None]


class LocalCluster(ClusterRun):
    """Runs a cluster while entered: ``async with LocalCluster(config, show)``.

    ``show(part, text)`` is called with each event, such as ("router", "ready at http://…"). Entering raises
    BatonError if the start fails.
    """

    def __init__(self, config: BatonConfig, show: Show) -> None:
        if config.ray.address and not config.redis.url:
            raise ConfigError("workers on other nodes need a Redis they can reach: pass --redis URL", "redis.url")
        super().__init__(config)
        self.slots: dict[str, SlotStatus] = {}
        self._show = show
        self._children: dict[str, ChildProcess] = {}
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
        """Returns part -> pid of the processes that run now: "router", "ray", "redis", and each slot's worker
        host.
        """
        return self._own() | self.hosts()

    async def down(self) -> None:
        """Ends every process within 5 s; processes that outlast their grace are killed."""
        self.close_slots()
        await _cancel(self._tasks)
        await asyncio.gather(
            *(child.stop(RAY_GRACE_S) for child in self._children.values()),
            asyncio.to_thread(self.end_hosts, HOST_GRACE_S),
        )
        await asyncio.to_thread(self.end_hosts, 0.0)  # started meanwhile
        self.stop_redis()
        self._reap()
        self.files.tidy()

    def kill(self) -> None:
        """Sends SIGKILL to every process of the cluster."""
        self.close_slots()
        for pid in self.pids.values():
            kill_session(pid)
        self._reap()

    # ---- up --------------------------------------------------------------------------------------------

    async def _up(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        adopt_orphans()
        self._tasks.append(lasting(self._keep_reaping, "reaping"))
        await self._compile()
        self._show("redis", self.start_redis())
        await self._start("router", python("baton.router_host.main", "--config", self.write_config()))
        placement = self._write_placement(self.plans())
        await self._start("ray", python("baton.launch.ray.host", "--spec", placement), pipes=True)
        self._keep("router", _nothing)
        self._keep("ray", self._read_reports)
        self._tasks.append(lasting(self._keep_redis, "private redis"))
        redis, namespace = self.config.redis.url, self.config.cluster.namespace
        self._tasks.append(lasting(partial(watch_scale, redis, namespace, self._scale), "scale"))
        await self._or_failure(self._until_ready(), self.config.cluster.start_timeout_s)
        self._is_up = True
        self._write_placement(self._planned)  # a Ray that is started again waits for room

    async def _compile(self) -> None:
        """Has kernels built before the start's time counts, where there are none for this CPU yet."""
        command = await asyncio.to_thread(compilation, self.config)
        if command is None:
            return
        self._show("kernels", "compiled for this CPU, once: minutes on a small machine")
        self._children["kernels"] = ChildProcess(command, self.files.logs / "kernels.log")
        await (await self._children["kernels"].start()).wait()
        del self._children["kernels"]

    async def _start(self, name: str, command: list[str], pipes: bool = False) -> None:
        self._children[name] = ChildProcess(command, self.files.logs / f"{name}.log", pipes)
        await self._children[name].start()

    def _keep(self, name: str, started: OnStart) -> None:
        def note(what: str) -> None:
            if self._is_up:
                self._show(name, f"{what}; starting it again")
            else:
                self._trouble(name, StartupError(f"{name} {what}: {self._children[name].last_words()}"))

        self._tasks.append(lasting(partial(self._children[name].keep, note, started), name))

    async def _keep_redis(self) -> None:
        while True:
            await asyncio.sleep(REDIS_LOOK_S)
            if self.tend_redis():
                self._show("redis", "ended; starting it again")

    async def _keep_reaping(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            with contextlib.suppress(OSError):
                self._reap()

    def _reap(self) -> None:
        reap_orphans(self._own().values())

    def _own(self) -> dict[str, int]:
        """part -> pid of our own children."""
        found = {name: child.pid for name, child in self._children.items() if child.pid}
        return found | ({"redis": self.redis_pid} if self.redis_pid else {})

    async def _read_reports(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            report = msgspec.json.decode(line, type=PlacementReport)
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
        if (failure := failure_of(status)) is not None:
            self._trouble(status.slot, failure)
        elif before is None or _said(before) != _said(status):
            self._show(status.slot, _said(status))

    def _trouble(self, part: str, error: BatonError) -> None:
        """Fatal while coming up; later a part's trouble is shown and the others go on."""
        assert self._failed is not None
        if self._is_up:
            self._show(part, error.message)
        elif not self._failed.done():
            self._failed.set_exception(error)

    async def _until_ready(self) -> None:
        while not self.has_all(self.slots.values()):
            self._changed.clear()
            await self._changed.wait()
        while not await asyncio.to_thread(self.is_ready):  # noqa: ASYNC110 (another process's state)
            await asyncio.sleep(0.1)
        self._show("router", f"ready at {self.url}")

    async def _or_failure(self, work: Work, timeout_s: float) -> None:
        assert self._failed is not None
        task = asyncio.create_task(work)
        done, _ = await asyncio.wait({task, self._failed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task not in done:
            await _cancel([task])
        for finished in done:
            finished.result()
        if not done:
            raise self.late(timeout_s, self.slots.values())

    async def _scale(self, asked: ScaleRequest) -> None:
        """Other numbers of workers from now on; Ray's process places and drains."""
        try:
            plans = self.resize(asked.prefill, asked.decode)
        except (ValueError, BatonError) as error:
            self._show("scale", f"prefill {asked.prefill}, decode {asked.decode} can't be: {error}")
            return
        self._write_placement(plans)  # for a Ray that is started again
        self._show("scale", f"prefill {asked.prefill}, decode {asked.decode}")
        process = self._children["ray"].process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.write(msgspec.json.encode(plans) + b"\n")
                await process.stdin.drain()

    def _write_placement(self, plans: list[HostPlan]) -> str:
        config, self._planned = self.config, plans
        spec = PlacementSpec(
            tuple(plans), str(self.files.ray), config.ray.address, config.ray.auth_mode,
            config.ray.object_store_bytes, config.worker.device == "cuda", ray_environment(config),
            config.ray.placement, config.worker.drain_grace_s, must_fit=not self._is_up,
            namespace=config.cluster.namespace,
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
    """Returns the line about a slot; once it differs there is a new one."""
    if status.state == "ready":
        role = f" as a {status.role} worker" if status.role and not status.slot.startswith(status.role) else ""
        adopted = " (adopted)" if status.adopted else ""
        return f"ready{role} at {status.address}, pid {status.pid}{adopted}"
    return f"{status.state}: {status.error.message}" if status.error else status.state
