"""A life of a simulated worker slot, made of the product's own parts.

A life does what ``worker.host`` does in a process of its own: it runs the engine, with service, server and
membership for one role after another, and shuts down in order.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from contextlib import AsyncExitStack, suppress
from functools import partial

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.membership import Membership, connect
from baton.cluster.roles import RoleWishes
from baton.drill.checks.watch import EngineWitness
from baton.drill.machines.process import Process
from baton.drill.models.pages import kind_of
from baton.drill.parts.adapters import LIMITS
from baton.drill.parts.engine import SimulatedEngine, model_id_of
from baton.drill.parts.far_host import SimulatedHost
from baton.drill.parts.figures import meterless_machine, metrics_of
from baton.drill.parts.slot import Slot
from baton.drill.parts.tier import FaultyStore
from baton.drill.redis.server import URL, connections
from baton.drill.rpc.client import SimulatedDialer
from baton.drill.rpc.server import Server
from baton.kv.pages.pool import PagePool
from baton.kv.tiers.disk import HEADER_BYTES, DiskTier
from baton.kv.tiers.slab import RECORD_BYTES, Slab
from baton.kv.transport.grpc import GrpcTransport
from baton.protos.channel import ListAdapters, SetRole
from baton.protos.errors import ErrorInfo, StartupError, WorkerLost
from baton.protos.nouns import KvLayout
from baton.worker.cache.block_exchange import WorkerBlocks
from baton.worker.control import RoleSwitch
from baton.worker.environment import WorkerEnvironment
from baton.worker.figures.report import WorkerReport
from baton.worker.host import ENGINE_HEARS_S
from baton.worker.membership import describe, enter
from baton.worker.server import RoleRuntime
from baton.worker.slot_guard import SlotGuard
from baton.worker.spec import WorkerSpec

NAMESPACE = "drill"
EPOCH_S = 1_700_000_000.0  # what wall clocks show as a run begins
BEAT_S = 1.0  # seconds between two heartbeats, and between two looks of a router at them
STALL_S = 4.0  # seconds of an engine's silence after which its worker is not serving; it is ended after twice that
HANG_UP_S = 1.0  # seconds for what is queued for routers as a role ends
LEAVE_S = 6.0  # seconds within which a worker that is told to stop has left: its grace, and some to say so
NOTICED_S = 0.1  # seconds after which a worker that drains has noticed that its engine died
HEARS_S = 0.5  # seconds after which an engine has heard that another host of its ranks is gone, or that its lead is
CHANGE_S = 5.0  # seconds after which a change of role failed


class Life:
    """One incarnation of a worker, from its start to its end."""

    def __init__(self, worker: Slot, number: int) -> None:
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
        self._drains = False  # whether somebody has drained it, whatever its role
        self._refusal: ErrorInfo | None = None  # why that came to nothing, and the role begins again
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
        self.far = self._other_host()

    def _other_host(self) -> SimulatedHost | None:
        """Makes the process on the other host of the engine's ranks, if there is one, and names it."""
        own, far = self.worker, self.engine.far
        if far is None:
            return None
        found = SimulatedHost(own.slot, self.number, own.network, own.clock, far)
        self.engine.ready = msgspec.structs.replace(self.engine.ready, senders=found.hosts, receivers=found.hosts)
        return found

    def lose_host(self) -> None:
        """Ends the process on the other host of the ranks abruptly; the engine hears so a moment later."""
        if self.far is not None and self.process.alive:
            self.far.kill()
            asyncio.get_running_loop().call_later(self.worker.rng.uniform(0.0, HEARS_S), self.engine.kill)

    def close(self) -> None:
        """Frees the memory of the life, which has ended."""
        if self.far is not None:
            self.far.close()
        self.engine.close()

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
            kind_of(own.scenario, *own.began_as, own.changes),
            own.hosts,
            own.cores,
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
        self._let_host_end()
        self._release_disk()
        self._end("killed")

    def _let_host_end(self) -> None:
        """Has the process on another host end, which hears a moment later that its lead is gone."""
        if self.far is not None:
            asyncio.get_running_loop().call_later(self.worker.rng.uniform(0.0, HEARS_S), self.far.kill)

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
        held["leases and streams at the other host"] = 0 if self.far is None else self.far.held()
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
            self.close()
            self.engine = self._made(self.engine.witness)
            self.far = self._other_host()
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
        if self.far is not None:
            self.far.start()
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
        described = describe(spec, self.engine.ready, self.incarnation)
        info = msgspec.structs.replace(described, role_error=self._refusal)
        async with AsyncExitStack() as stack:
            report = WorkerReport(info, metrics_of(info), meterless_machine(), self.worker.clock.now)
            runtime = RoleRuntime(spec, self.engine, report, info, blocks, self._keys, self._environment())
            if self._drains:
                runtime.control.begin_drain()
            server = Server(self.process.spawn)
            runtime.add_to(server)  # type: ignore[arg-type]
            runtime.control.info = msgspec.structs.replace(runtime.control.info, address=self.address)
            try:
                await self._join_hosts(runtime, stack)
            except StartupError:
                return "the other host of its ranks doesn't answer"
            network.listen(self.address, self.process.name, server)
            stack.push_async_callback(runtime.transport.close)
            self.runtime = runtime
            member = await enter(redis, spec, runtime, report, stack, self._held)
            if self._refusal is not None and runtime.control.announce is not None:
                await runtime.control.announce(runtime.control.info, self.role, "")
            if self._change is not None:
                self.worker.witnesses.serves(self.worker.slot)
            listening = asyncio.create_task(runtime.listen(), name="engine")
            why = await self._until_over(runtime, member, listening)
            network.unlisten(self.address)
            await server.stop(HANG_UP_S)
            network.hang_up(server)
            listening.cancel()
            self._held, self._drains = member.index.held, runtime.control.drains
        return why

    async def _join_hosts(self, runtime: RoleRuntime, stack: AsyncExitStack) -> None:
        """Connects to the other host of the ranks, as ``worker.server.serve_grpc`` does. Raises StartupError."""
        if runtime.receivers is not None:
            stack.push_async_callback(runtime.receivers.close)
            runtime.control.receivers = await runtime.receivers.open(runtime.control.info)
        if runtime.hosts is not None:
            stack.push_async_callback(runtime.hosts.close)

    async def _until_over(self, runtime: RoleRuntime, member: Membership, listening: asyncio.Task[None]) -> str:
        changing = asyncio.create_task(self._changes(runtime), name="role")
        stopped = asyncio.create_task(self.stop.wait())
        watching = asyncio.create_task(self._watch(runtime), name="engine watch")
        hosts = asyncio.create_task(self._watch_hosts(runtime), name="hosts watch")
        await asyncio.wait({listening, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (changing, stopped, watching):
            task.cancel()
        try:
            return await self._role_over(runtime, member)
        finally:
            hosts.cancel()  # until then handoffs to other hosts go on

    async def _role_over(self, runtime: RoleRuntime, member: Membership) -> str:
        """Ends a role in order; returns why the life ends, "" if another role follows."""
        if runtime.next_role:
            assert self._change is not None
            self._refusal = runtime.role_error
            became = self._change.became(runtime.next_role, self._refusal, runtime.environment.new_id)
            self.role, self.incarnation = became.role, became.incarnation
            return ""
        if not runtime.engine_lost:
            self._told_at = asyncio.get_running_loop().time()
            if await runtime.leave(self._spec().server.drain_grace_s, member):
                self._require_engine()
                await member.depart("drained", "told to stop; it drained")
                return "drained"
        runtime.lost(WorkerLost(f"the engine of {self.worker.slot} died ({self.engine.obituary()})"))
        await member.depart("engine", "it died")
        return "its engine died"

    def _require_engine(self) -> None:
        """Reports a drain that went on although nobody could finish a request any more."""
        without_s = asyncio.get_running_loop().time() - self.engine.died_at
        if without_s > NOTICED_S:
            self.worker.witnesses.violated(f"{self.process.name} drained {without_s:.1f} s without its engine")

    async def _changes(self, runtime: RoleRuntime) -> None:
        self._change = await runtime.control.next_role_change()
        self.worker.witnesses.changes(self.worker.slot)
        self.worker.aims.reached(self.worker.slot, "changing", self.worker.slot)
        await runtime.control.leave_role(self._change)
        self.engine.channel.send(SetRole(self._change.role))
        await asyncio.sleep(CHANGE_S)
        self.engine.kill()

    async def _watch(self, runtime: RoleRuntime) -> None:
        await runtime.wait_stuck(STALL_S)
        self.engine.kill()

    async def _watch_hosts(self, runtime: RoleRuntime) -> None:
        """Ends the engine once nobody can say any more who writes pages on another host of its ranks."""
        lost = await runtime.wait_host_lost()
        await asyncio.sleep(ENGINE_HEARS_S)
        self.worker.tell(self.worker.slot, lost)
        self.engine.kill()

    # ---- what it consists of ----

    def _spec(self) -> WorkerSpec:
        own, page_bytes = self.worker.scenario, self.engine.ready.layout.page_bytes
        return WorkerSpec.of(
            self.worker.slot,
            self.role,
            "/nowhere",
            model_name=model_id_of(self.worker.model),
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
        self._let_host_end()
        self._release_disk()

    def _end(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)
