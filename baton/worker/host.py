"""A worker's I/O process: start the engine, serve its role over gRPC, be a member, leave in order. No torch.

A life has one engine and one role after another: a change of role ends the service, the server and the membership
of the old one and begins those of the new one, around the same engine process, weights and pages.

Knows nothing of Ray. It holds its slot's lock for as long as it lives, and ends with non-zero status as soon as
its engine is gone: a worker is two processes that live and die together.

    python -m baton.worker.host --spec FILE_OR_JSON
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from baton.cluster.membership import Membership
from baton.cluster.metering.telemetry import WorkerMetrics, rename_service, setup_tracing
from baton.engine.backends.cuda.gpu import resolved_device
from baton.engine.speculate.names import loads_files
from baton.kv.exchange.filling import FillReport
from baton.kv.memory import copying
from baton.process.heap import settle_heap
from baton.process.liveness import alive_file, beat
from baton.process.loop_watch import watching
from baton.process.security import identity_of, show_end
from baton.process.time_limit import end_if_loop_stalls, end_with, end_within
from baton.protos.channel import EngineReady, SetRole
from baton.protos.errors import ErrorInfo, StartupError, Unavailable, WorkerLost, to_info
from baton.protos.nouns import WorkerInfo
from baton.tasks.lasting import counting_failures, lasting
from baton.worker.cache.block_exchange import WorkerBlocks
from baton.worker.control import RoleSwitch
from baton.worker.engine_process import EngineProcess
from baton.worker.environment import WorkerEnvironment
from baton.worker.figures.report import Machine, WorkerReport
from baton.worker.membership import describe, join, start_role
from baton.worker.server import CurrentRegistry, RoleRuntime, serve_grpc, serve_metrics
from baton.worker.slot_guard import SlotGuard
from baton.worker.slots import SlotRecord, WorkerSlot
from baton.worker.spec import WorkerSpec, load_spec

T = TypeVar("T")
log = logging.getLogger("baton.worker")

# Exit statuses: didn't start, another process has the slot, the engine died.
EXIT_STARTUP, EXIT_TAKEN, EXIT_ENGINE_LOST = 1, 3, 70
SERVICE = "baton-"  # before the role: the service of a worker's spans
STOP_GRACE_S = 0.3  # seconds for calls in flight as the server stops, which is after the drain
HANG_UP_S = 1.0  # seconds for what is queued for routers as a role ends; normally it takes milliseconds
ENGINE_HEARS_S = 2.0  # seconds for an engine to hear that ranks of another host are gone; it takes milliseconds
CHANGE_S = 5.0  # seconds after which a change of role failed: an idle engine needs less than one
LOAD_S = 300.0  # where a draft model may be loaded as it changes: an engine that does nothing meanwhile ends sooner
# What takes longer hangs, and is ended so that the slot comes free: opening what a role serves; leaving, beyond its
# drain; leaving without an engine, when there is little to put in order. So is an event loop that stands still.
OPEN_S, LEAVE_S, LOST_S, HUNG_S = 15.0, 8.0, 3.0, 60.0


def main() -> int:
    """Runs a worker from the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="baton.worker.host")
    parser.add_argument("--spec", required=True, help="WorkerSpec: JSON, or a file that holds it")
    try:
        spec = load_spec(parser.parse_args().spec)
    except StartupError as error:
        print(error.message, file=sys.stderr)
        return EXIT_STARTUP
    return run(spec)


def run(spec: WorkerSpec) -> int:
    """Runs the worker of ``spec`` in this process until its end, and returns its exit status."""
    logging.basicConfig(
        level=spec.observe.log_level.upper(), format=f"%(asctime)s {spec.slot} %(levelname)s %(message)s"
    )
    engine = msgspec.structs.replace(spec.engine, device=resolved_device(spec.engine.device))
    spec = msgspec.structs.replace(spec, engine=engine)
    slot = WorkerSlot(spec.slot_dir, spec.slot)
    if not slot.acquire():
        log.error("slot %s is held by process %s", spec.slot, slot.holder())
        return EXIT_TAKEN
    return uvloop.run(WorkerHost(spec, slot, settle_heap).run())


class WorkerHost:
    """Runs one worker process: its engine, and one role after another.

    ``prepared`` is called before the first role begins.
    """

    def __init__(self, spec: WorkerSpec, slot: WorkerSlot, prepared: Callable[[], None] = lambda: None):
        self.spec = spec
        self.slot = slot
        self.prepared = prepared
        self.record = SlotRecord(spec.slot, os.getpid(), incarnation=secrets.token_hex(8))
        self.stop: asyncio.Event = asyncio.Event()

    async def run(self) -> int:
        """Runs the worker from start to end; returns the exit status."""
        watch_signals(self.stop)
        watch_owner(self.spec.owner_pid, self.stop)
        self.spec = msgspec.structs.replace(self.spec, role=await start_role(self.spec, self.slot.read()))
        self._say(state="starting", role=self.spec.role)
        try:
            identity_of(self.spec.server.tls)  # what is wrong with it is said before a model is loaded
            self._guard = SlotGuard(self.spec, self.stop, self._say_waiting)
            async with self._guard as mine:
                engine = await self._unless_stopped(EngineProcess.start(self.spec)) if mine else None
                return 0 if engine is None else await self._with(engine)
        except StartupError as error:
            log.error("%s", error.message)
            self._say(state="failed", error=to_info(error))
            return EXIT_STARTUP

    def _say_waiting(self, place: str) -> None:
        waits = Unavailable(f"{self.spec.slot} is served from {place}; waiting until it is not")
        self._say(state="starting", error=to_info(waits))

    async def _with(self, engine: EngineProcess) -> int:
        shutdown_tracing = setup_tracing(SERVICE + self.spec.role, self.spec.observe.otlp_endpoint, self.spec.slot)
        try:
            return await self._serve(engine)
        finally:
            end_within(LEAVE_S)  # also after an error, with servers and tasks still up
            engine.leave()
            await asyncio.to_thread(shutdown_tracing)

    async def _serve(self, engine: EngineProcess) -> int:
        async with AsyncExitStack() as stack:
            core = WorkerCore(self.spec, engine, describe(self.spec, engine.ready, self.record.incarnation))
            stack.push_async_callback(core.blocks.close)
            self._say(
                engine_pid=engine.process.pid,
                metrics_address=serve_metrics(self.spec.slot, self.spec.server, core.registry, stack),
            )
            await self._unless_stopped(asyncio.to_thread(copying.prepare))  # compiles where nobody has yet
            log.info("%s keeps its KV on %s", self.spec.slot, engine.memory.backing)
            self.prepared()
            stack.enter_context(watching(self.spec.observe.loop_stall_s))
            stack.enter_context(counting_failures(core.task_failed))
            while (status := await self._play(engine, core)) is None:
                self.spec = msgspec.structs.replace(self.spec, role=core.change.role)
                rename_service(SERVICE + self.spec.role)
                self._say(incarnation=core.change.incarnation)
        return status

    async def _play(self, engine: EngineProcess, core: WorkerCore) -> int | None:
        """One role, from ready to gone; the exit status, or None when ``core.change`` says what comes next."""
        info = self._info(engine.ready, core.refusal)
        report = core.begin(info)
        end_within(OPEN_S)
        async with AsyncExitStack() as stack:
            worker = RoleRuntime(self.spec, engine, report, info, core.blocks, core.keys, core.environment)
            if core.drains:
                worker.control.begin_drain()
            server = await serve_grpc(self.spec, worker, stack)
            member = await join(self.spec, worker, report, stack, core.held)
            info = worker.control.info
            if core.refusal is not None and worker.control.announce is not None:
                await worker.control.announce(info, info.role, "")  # a restart begins in the role that works
            self._say(state="ready", role=info.role, address=info.address, error=None)
            log.info("%s ready on %s: %s, %d pages", info.role, info.address, info.model_id, info.pages)
            listening = asyncio.create_task(worker.listen(), name="engine")
            alive = alive_file(self.spec.slot_dir, self.spec.slot)
            beating = lasting(partial(beat, worker.health, alive), "alive")
            status = await self._until_over(worker, engine, member, core, listening)
            await server.stop(HANG_UP_S if status is None else STOP_GRACE_S)
            listening.cancel()
            beating.cancel()
            core.held = member.index.held if member is not None else ()
            if status is None:
                core.changed(worker.next_role, worker.role_error)
                core.drains = worker.control.drains
        return status

    async def _until_over(
        self,
        worker: RoleRuntime,
        engine: EngineProcess,
        member: Membership | None,
        core: WorkerCore,
        listening: asyncio.Task[None],
    ) -> int | None:
        changing = asyncio.create_task(self._change(worker, engine, core), name="role")
        stopped = asyncio.create_task(self.stop.wait())
        turning = lasting(partial(end_if_loop_stalls, HUNG_S), "loop stalls")
        watching = lasting(partial(self._watch, worker, engine), "engine watch")
        hosts = lasting(partial(self._watch_hosts, worker, engine), "hosts watch")
        await asyncio.wait({listening, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (changing, stopped, turning, watching):
            task.cancel()
        try:
            return await self._over(worker, engine, member)
        finally:
            hosts.cancel()  # until then handoffs to other hosts go on

    async def _over(self, worker: RoleRuntime, engine: EngineProcess, member: Membership | None) -> int | None:
        """Ends a role in order; returns the exit status, None if another role follows."""
        if worker.next_role:
            end_within(LEAVE_S)
            return None
        grace_s = self.spec.server.drain_grace_s
        end_within(LEAVE_S + grace_s)
        if not worker.engine_lost and await worker.leave(grace_s, member):
            if member is not None:
                await member.depart(*self._leaving())
            return 0
        end_within(LOST_S)
        error = WorkerLost(f"the engine of {self.spec.slot} died ({engine.obituary()})")
        log.error("%s", error.message)
        worker.lost(error)
        if member is not None:
            await member.depart("engine", error.message)
        return EXIT_ENGINE_LOST

    def _leaving(self) -> tuple[str, str]:
        """Returns why an orderly end was asked for."""
        if self._guard.lost:
            return "slot_lost", "another node serves its slot now"
        return "drained", "told to stop; it drained"

    async def _watch(self, worker: RoleRuntime, engine: EngineProcess) -> None:
        """End an engine that gets on no more: whoever starts the worker again gives it a new one."""
        await worker.wait_stuck(self.spec.steps.stall_s)
        log.error(
            "the engine of %s gave no answer for %g s: it is ended", self.spec.slot, 2 * self.spec.steps.stall_s
        )
        engine.process.kill()

    async def _watch_hosts(self, worker: RoleRuntime, engine: EngineProcess) -> None:
        """End the engine once nobody can say any more who writes pages on another host of its ranks.

        Where that host, or a process of it, has died, the engine hears so itself and says which rank it was.
        """
        lost = await worker.wait_host_lost()
        await asyncio.sleep(ENGINE_HEARS_S)
        log.error("%s: the engine of %s is ended", lost, self.spec.slot)
        engine.process.kill()

    async def _change(self, worker: RoleRuntime, engine: EngineProcess, core: WorkerCore) -> None:
        """Lets go of every request when asked to, and tells the engine; ``listen`` hears that it is done.

        An engine that doesn't get there is ended: whoever starts it again gets the new role that way.
        """
        core.change = await worker.control.next_role_change()
        log.info("%s becomes a %s worker", self.spec.slot, core.change.role)
        loads = core.change.role == "decode" and loads_files(self.spec.steps.speculation)
        limit_s = LOAD_S if loads else CHANGE_S
        try:
            await worker.control.leave_role(core.change)
            engine.channel.send(SetRole(core.change.role))
            await asyncio.sleep(limit_s)
        except Exception:
            log.exception("the change of role failed")
        log.error("the engine did not become a %s worker within %g s: it is ended", core.change.role, limit_s)
        engine.process.kill()

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of ``work``, or None when we are told to stop first."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self.stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    def _info(self, ready: EngineReady, role_error: ErrorInfo | None) -> WorkerInfo:
        info = describe(self.spec, ready, self.record.incarnation)
        return msgspec.structs.replace(info, metrics_address=self.record.metrics_address, role_error=role_error)

    def _say(self, **fields: object) -> None:
        self.record = msgspec.structs.replace(self.record, **fields)
        self.slot.write(self.record)


class WorkerCore:
    """Owns what outlives a role: the exchange of blocks, the metrics' port, what was learned of the machine.

    ``keys`` number requests on the engine's channel; ``held`` are the hashes of the blocks cached when the last
    role ended.
    """

    change: RoleSwitch  # what ended the last role
    drains = False  # whether somebody has drained the worker, whatever its role
    refusal: ErrorInfo | None = None  # why that came to nothing, and the role begins again

    def __init__(self, spec: WorkerSpec, engine: EngineProcess, info: WorkerInfo) -> None:
        self.keys = itertools.count(1)
        self.environment = WorkerEnvironment.real(identity_of(spec.server.tls))
        self.blocks = WorkerBlocks(spec, engine, info, self._fetched, self.environment)
        self.held: tuple[bytes, ...] = ()
        self._spec, self._machine = spec, Machine.unknown(engine.ready.work)
        self._report = self._made(info)
        self.registry = CurrentRegistry(self._report.metrics.registry)

    def changed(self, role: str, error: ErrorInfo | None) -> None:
        """Records that the engine has ``role`` now, which isn't the one that was asked for if there is an
        ``error``.
        """
        self.refusal = error
        if error is not None:
            log.error("%s stays a %s worker: %s", self._spec.slot, role, error.message)
        self.change = self.change.became(role, error, self.environment.new_id)

    def begin(self, info: WorkerInfo) -> WorkerReport:
        """Returns the report of a new role, whose metrics /metrics shows from now on."""
        self._report = self._made(info)
        self.registry.present = self._report.metrics.registry
        return self._report

    def task_failed(self, task: str) -> None:
        """Counts a failure of a background task in the present role's metrics."""
        self._report.metrics.task_failed(task)

    def _fetched(self, report: FillReport) -> None:
        self._report.fetched(report)

    def _made(self, info: WorkerInfo) -> WorkerReport:
        own, tls = self._spec.observe, self._spec.server.tls
        metrics = WorkerMetrics(
            CollectorRegistry(), info.role, info.worker_id, info.model_id, own.vllm_names, own.telemetry
        )
        if tls is not None:
            show_end(tls, metrics.optional("certificate"))
        return WorkerReport(info, metrics, self._machine)


def watch_signals(stop: asyncio.Event) -> None:
    """Sets ``stop`` on SIGTERM or SIGINT, for an orderly end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def watch_owner(pid: int, stop: asyncio.Event) -> None:
    """Sets ``stop`` when process ``pid`` ends; does nothing for 0."""
    if not pid:
        return
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        stop.set()
        return
    loop = asyncio.get_running_loop()

    def gone() -> None:
        loop.remove_reader(fd)
        stop.set()

    loop.add_reader(fd, gone)


if __name__ == "__main__":
    end_with(main)
