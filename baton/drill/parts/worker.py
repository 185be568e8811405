"""A simulated worker: a slot, which is filled by one life after another, made of the product's own parts.

A life does what ``worker.host`` does in a process of its own: it runs the engine, with service, server and
membership for one role after another, and shuts down in order. The slot then starts the next life.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import random
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.membership import Membership, connect
from baton.cluster.metering.telemetry import WorkerMetrics
from baton.cluster.roles import RoleWishes
from baton.cost.fit import AdaptedStepFit, TransferFit
from baton.drill.checks.watch import EngineWitness, Witnesses
from baton.drill.machines.clock import MachineClock
from baton.drill.machines.network import Network
from baton.drill.machines.process import Process
from baton.drill.parts.adapters import LIMITS, SimulatedFiles
from baton.drill.parts.aims import Aims
from baton.drill.parts.engine import MODEL_ID, SimulatedEngine, SimulatedPace
from baton.drill.parts.pages import kind_of
from baton.drill.parts.tier import FaultyStore, TierHealth, damage
from baton.drill.redis.server import URL, connections
from baton.drill.rpc.client import SimulatedDialer
from baton.drill.rpc.server import Server
from baton.drill.scenario import Scenario
from baton.kv.pages.pool import PagePool
from baton.kv.tiers.disk import HEADER_BYTES, DiskTier
from baton.kv.tiers.slab import RECORD_BYTES, Slab
from baton.kv.transport.grpc import GrpcTransport
from baton.protos.channel import ListAdapters, SetRole
from baton.protos.errors import WorkerLost
from baton.protos.nouns import KvLayout, WorkerInfo
from baton.worker.cache.block_exchange import WorkerBlocks
from baton.worker.control import RoleSwitch
from baton.worker.environment import WorkerEnvironment
from baton.worker.figures.report import Machine, WorkerReport
from baton.worker.membership import describe, enter
from baton.worker.server import RoleRuntime
from baton.worker.slot_guard import SlotGuard
from baton.worker.spec import WorkerSpec

NAMESPACE = "drill"
EPOCH_S = 1_700_000_000.0  # what wall clocks show as a run begins
BEAT_S = 1.0  # seconds between two heartbeats, and between two looks of a router at them
RESTART_S = 1.0  # seconds after which a worker that ended is started again
STALL_S = 4.0  # seconds of an engine's silence after which its worker is not serving; it is ended after twice that
HANG_UP_S = 1.0  # seconds for what is queued for routers as a role ends
LEAVE_S = 6.0  # seconds within which a worker that is told to stop has left: its grace, and some to say so
CHANGE_S = 5.0  # seconds after which a change of role failed
Tell = Callable[[str, str], None]  # who, and what happened


class NoEnergy:
    """An energy meter of a machine that has none."""

    def joules(self) -> dict[str, float]:
        """Returns {}, because a simulated machine has no meter."""
        return {}


class SimulatedWorker:
    """A worker slot: runs one life at a time, and starts the next when it ends."""

    def __init__(
        self,
        slot: str,
        role: str,
        scenario: Scenario,
        network: Network,
        witnesses: Witnesses,
        tell: Tell,
        aims: Aims,
        adapters: SimulatedFiles | None = None,
        disks: Path = Path("/nowhere"),
    ) -> None:
        self.adapters, self.aims, self.disks = adapters, aims, disks
        self.slot, self.role, self.weights, self.witnesses = slot, role, 0, witnesses
        self.scenario, self.network, self.tell = scenario, network, tell
        self.rng = random.Random(f"{scenario.seed} {slot}")
        self.pace, self.tier_health, self.clock = SimulatedPace(), TierHealth(), MachineClock()
        self.requests = {request.number: request for request in scenario.requests}
        self._lives = itertools.count(1)
        self.life: Life | None = None
        self.dead: list[Life] = []
        self.held_back_until = self.wall_ahead_s = 0.0
        self._living: asyncio.Task[None] | None = None
        self.placed = False

    def start(self) -> None:
        """Starts the first life; from now on each life is followed by the next."""
        self.placed = True
        if self._living is None or self._living.done():
            nobodys = contextvars.Context()  # whoever starts it may end before it
            self._living = asyncio.get_running_loop().create_task(self._live(), context=nobodys)

    def place(self, role: str) -> None:
        """Starts the worker as one of ``role``; one that still drains is started again once it has left."""
        self.role = role
        self.start()

    def displace(self) -> None:
        """Has the present life drain and leave, and starts no other."""
        self.placed = False
        if self.life is not None:
            self.life.stop.set()

    def stop(self) -> None:
        """Kills the present life, and starts no other."""
        self.placed = False
        if self._living is not None:
            self._living.cancel()
        self.kill()

    def kill(self, held_back_s: float = 0.0, crash: bool = False) -> None:
        """Kills the present life abruptly; the next starts ``held_back_s`` seconds later than usual. In a ``crash``
        of the machine its disk tier is damaged.
        """
        self.held_back_until = asyncio.get_running_loop().time() + held_back_s
        if self.life is not None:
            self.life.kill()
        if crash and (self.disks / self.slot).is_dir():
            damage(self.disks / self.slot, self.rng)

    async def _live(self) -> None:
        while self.placed:
            self.life = life = Life(self, next(self._lives))
            self.tell(self.slot, f"starts as {life.incarnation}")
            why = await life.begin()
            self.tell(self.slot, f"ended: {why}")
            self.life, self.role = None, life.role
            self.dead.append(life)
            await asyncio.sleep(RESTART_S + max(0.0, self.held_back_until - asyncio.get_running_loop().time()))


class Life:
    """One incarnation of a worker, from its start to its end."""

    def __init__(self, worker: SimulatedWorker, number: int) -> None:
        self.worker, self.number, self.role = worker, number, worker.role
        self.incarnation = f"{worker.slot}-{number}"
        self.process = Process(f"{worker.slot}#{number}", worker.clock)
        self.address = f"{worker.slot}:8100"
        self.stop = asyncio.Event()
        self.runtime: RoleRuntime | None = None
        self._ids = itertools.count(1)
        self._keys = itertools.count(1)
        self._held: tuple[bytes, ...] = ()
        self._change: RoleSwitch | None = None
        self._disk: DiskTier | None = None
        self._told_at = math.inf  # loop time at which it was told to stop
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        witness = EngineWitness(
            self.process.name,
            worker.requests,
            worker.scenario.lease_ttl_s,
            worker.scenario.heard_s,
            worker.witnesses,
            {} if worker.adapters is None else worker.adapters.of_request,
            lambda number, phase: worker.aims.reached(number, phase, worker.slot),
        )
        self.engine = self._made(witness)

    def _made(self, witness: EngineWitness) -> SimulatedEngine:
        own = self.worker
        return SimulatedEngine(
            self.process.name,
            self.role,
            own.scenario,
            own.pace,
            own.rng,
            witness,
            own.weights,
            own.adapters,
            own.clock,
            own.network.memory,
            kind_of(own.scenario, *_place(own.slot)),
        )

    async def begin(self) -> str:
        """Runs the worker until it ends; returns why it ended."""
        self.process.spawn(self._run(), "host").add_done_callback(self._over)
        return await self._ended

    def kill(self) -> None:
        """Ends the I/O process and the engine abruptly."""
        self.worker.network.process_died(self.process.name)
        self.engine.kill()
        self.process.kill()
        self._release_disk()
        self._end("killed")

    def _release_disk(self) -> None:
        """Closes the files of the disk tier, as the operating system does for a process that ended."""
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()

    @property
    def keeps(self) -> tuple[PagePool, str, KvLayout]:
        """Returns the engine's pages, the fingerprint of its weights, and the layout of a page."""
        return self.engine.pool, self.engine.ready.fingerprint, self.engine.ready.layout

    def unrest(self) -> list[str]:
        """Returns a message for each kind of resource that is still held; empty if all were released."""
        self.engine.pool.check()
        counts = self.engine.pool.snapshot_counts()
        held = {"leased pages": counts.leased, "quarantined pages": counts.quarantined, "leases": counts.leases}
        swap = getattr(self.engine.loop, "swap", None)
        held["bytes set aside"] = 0 if swap is None else swap.used
        adapters = self.engine.loop.parts.adapters.listed(ListAdapters(0)).adapters
        held["uses of adapters"] = sum(adapter.running for adapter in adapters)
        held["adapters that are to go"] = sum(adapter.leaving for adapter in adapters)
        held["pages shared with the I/O side"] = len(self.engine.loop.parts.sharing)
        if self.runtime is not None:
            held["requests of the service"] = self.runtime.service.active
            held["open streams"] = self.runtime.intake.open_streams
        return [f"{self.process.name}: {count} {what}" for what, count in held.items() if count]

    # ---- what worker.host does ----

    async def _run(self) -> str:
        own = self.worker
        redis = connect(URL, connections(own.network, self.process.name))
        with suppress(RedisError, OSError):
            self.role = await RoleWishes(redis, NAMESPACE).of(own.slot) or self.role
        if self.role != self.engine.role:
            self.engine.memory.close()
            self.engine = self._made(self.engine.witness)
        place = f"node-{own.rng.randrange(2)}"  # a successor may come on another node, and waits for the slot then
        guard = SlotGuard(self._spec(), self.stop, self._waits, redis, self.incarnation, place)
        async with guard as mine:
            why = await self._serve(redis) if mine else "told to stop before it served"
        return "its slot is served elsewhere" if guard.lost else why

    def _waits(self, place: str) -> None:
        self.worker.tell(self.worker.slot, f"waits for {place}, which has the slot")

    async def _serve(self, redis: Redis) -> str:
        own = self.worker
        self.engine.start()
        spec = self._spec()
        blocks = WorkerBlocks(
            spec,
            self.engine,
            describe(spec, self.engine.ready, self.incarnation),
            lambda report: None,
            self._environment(),
        )
        allocate = partial(own.network.memory.allocate, self.process.name)
        for slab in blocks.tiers().values():
            if isinstance(slab, Slab):
                slab.store = FaultyStore(slab.store, own.tier_health, lambda: self.process.alive, allocate)
        self._disk = blocks.disk
        why = ""
        while not why:
            why = await self._play(redis, blocks)
        return why

    async def _play(self, redis: Redis, blocks: WorkerBlocks) -> str:
        """Serves one role, from registration to the end; returns why the life ends, "" if another role follows."""
        network, spec = self.worker.network, self._spec()
        info = describe(spec, self.engine.ready, self.incarnation)
        async with AsyncExitStack() as stack:
            report = WorkerReport(info, _metrics(info), _machine(), self.worker.clock.now)
            runtime = RoleRuntime(spec, self.engine, report, info, blocks, self._keys, self._environment())
            server = Server(self.process.spawn)
            runtime.add_to(server)  # type: ignore[arg-type]
            runtime.control.info = msgspec.structs.replace(runtime.control.info, address=self.address)
            network.listen(self.address, self.process.name, server)
            stack.push_async_callback(runtime.transport.close)
            self.runtime = runtime
            member = await enter(redis, spec, runtime, report, stack, self._held)
            listening = asyncio.create_task(runtime.listen(), name="engine")
            why = await self._until_over(runtime, member, listening)
            network.unlisten(self.address)
            await server.stop(HANG_UP_S)
            network.hang_up(server)
            listening.cancel()
            self._held = member.index.held
        return why

    async def _until_over(self, runtime: RoleRuntime, member: Membership, listening: asyncio.Task[None]) -> str:
        changing = asyncio.create_task(self._changes(runtime), name="role")
        stopped = asyncio.create_task(self.stop.wait())
        watching = asyncio.create_task(self._watch(runtime), name="engine watch")
        await asyncio.wait({listening, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (changing, stopped, watching):
            task.cancel()
        if runtime.next_role:
            assert self._change is not None
            self.role, self.incarnation = runtime.next_role, self._change.incarnation
            return ""
        if not runtime.engine_lost:
            self._told_at = asyncio.get_running_loop().time()
            await runtime.leave(self._spec().server.drain_grace_s, member)
            await member.depart("drained", "told to stop; it drained")
            return "drained"
        runtime.lost(WorkerLost(f"the engine of {self.worker.slot} died ({self.engine.obituary()})"))
        await member.depart("engine", "it died")
        return "its engine died"

    async def _changes(self, runtime: RoleRuntime) -> None:
        self._change = await runtime.control.next_role_change()
        await runtime.control.leave_role(self._change)
        self.engine.channel.send(SetRole(self._change.role))
        await asyncio.sleep(CHANGE_S)
        self.engine.kill()

    async def _watch(self, runtime: RoleRuntime) -> None:
        await runtime.wait_stuck(STALL_S)
        self.engine.kill()

    # ---- what it consists of ----

    def _spec(self) -> WorkerSpec:
        own, page_bytes = self.worker.scenario, self.engine.ready.layout.page_bytes
        return WorkerSpec.of(
            self.worker.slot,
            self.role,
            "/nowhere",
            model_name=MODEL_ID,
            device="paced:drill",
            kv_transport="grpc",
            namespace=NAMESPACE,
            beat_s=BEAT_S,
            lease_ttl_s=own.lease_ttl_s,
            host_tier_bytes=own.tier_pages * (page_bytes + RECORD_BYTES),
            disk_tier_bytes=HEADER_BYTES + own.disk_pages * (page_bytes + RECORD_BYTES) if own.disk_pages else 0,
            disk_tier_dir=str(self.worker.disks),
            adapter_root=LIMITS.root if own.adapters else "",
            max_adapters=LIMITS.max_loaded,
            max_adapter_bytes=LIMITS.max_bytes,
        )

    def _environment(self) -> WorkerEnvironment:
        clock, dialer = self.worker.clock.now, SimulatedDialer(self.worker.network, self.process.name)
        return WorkerEnvironment(
            clock=clock,
            wall_clock=lambda: EPOCH_S + clock() + self.worker.wall_ahead_s,
            copy_clock=clock,
            new_id=lambda: f"{self.worker.slot}-{self.number}.{next(self._ids)}",
            dialer=dialer,
            sender=lambda name, memory: GrpcTransport(dialer),
        )

    # ---- its end ----

    def _over(self, task: asyncio.Task[str]) -> None:
        took = self.worker.clock.now() - self._told_at
        if took > LEAVE_S and self.worker.scenario.lets_leave:
            self.worker.witnesses.violated(f"{self.process.name} left {took:.1f} s after it was told to stop")
        if task.cancelled():
            self._end("killed")
        elif (error := task.exception()) is not None:
            self.worker.witnesses.violated(f"{self.process.name} failed: {error!r}")
            self._end("failed")
        else:
            self._end(task.result())
        self.worker.network.process_died(self.process.name)
        self.engine.kill()
        self.process.kill()
        self._release_disk()

    def _end(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)


def _place(slot: str) -> tuple[str, int]:
    """Returns the role that a slot began with, and its number among those of that role."""
    role, _, number = slot.rpartition("-")
    return role, int(number)


def _metrics(info: WorkerInfo) -> WorkerMetrics:
    return WorkerMetrics(CollectorRegistry(), info.role, info.worker_id, info.model_id)


def _machine() -> Machine:
    return Machine(None, NoEnergy(), AdaptedStepFit(), TransferFit(), TransferFit())  # type: ignore[arg-type]
