"""The servers of a worker's I/O process, and the dispatch of its engine's messages to its role's service.

Knows nothing of slots, processes' ends or Redis.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import assert_never
from wsgiref.simple_server import WSGIServer

import grpc
import grpc.aio
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector, RestrictedRegistry

from baton.cluster.membership import Membership
from baton.decode_worker.io.host_intake import HostIntake
from baton.decode_worker.io.host_receivers import HostReceivers
from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.service import DecodeService
from baton.decode_worker.io.shell import DecodeShell
from baton.kv.transport.auto import AUTO, AutoTransport
from baton.kv.transport.grpc import handoff_handler, server_options
from baton.kv.wire.describing import ask_worker, this_host
from baton.prefill_worker.io.divided_handoff import Receivers
from baton.prefill_worker.io.handoff import HandoffReport
from baton.prefill_worker.io.handoff_frames import Sender
from baton.prefill_worker.io.host_senders import HostSenders
from baton.prefill_worker.io.service import DecodePeers, PrefillService
from baton.prefill_worker.io.shell import PrefillShell
from baton.process.metrics_server import start_metrics
from baton.process.security import identity_of, warn_of_plaintext
from baton.protos import channel as ch
from baton.protos.errors import BatonError, ConfigError, ErrorInfo, WorkerLost
from baton.protos.nouns import WorkerInfo
from baton.protos.rpc import settled
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.tls.rpc import WORKER_CALLS, NameGuard, add_port, names_for
from baton.worker.cache.block_exchange import WorkerBlocks
from baton.worker.control import RoleService, WorkerControl, WorkerShell
from baton.worker.data_ports import open_data_ports
from baton.worker.engine_progress import PATIENCE, EngineProgress
from baton.worker.engine_watch import EngineWatch
from baton.worker.environment import Engine, WorkerEnvironment
from baton.worker.figures.report import WorkerReport
from baton.worker.spec import ServerSpec, WorkerSpec

log = logging.getLogger("baton.worker")


TO_HOSTS = frozenset((AUTO, "tcp", "grpc"))  # settings of KV's transport by which other hosts of ranks receive it


class RoleRuntime:
    """Runs a role's service with its engine, until the engine dies or changes its role.

    ``blocks`` and ``keys`` (of requests and questions on the engine's channel) outlive a role.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        engine: Engine,
        report: WorkerReport,
        info: WorkerInfo,
        blocks: WorkerBlocks,
        keys: Iterator[int],
        environment: WorkerEnvironment,
    ):
        self._over = asyncio.Event()  # the engine has died
        self.next_role = ""
        self.role_error: ErrorInfo | None = None  # why ``next_role`` is the present one
        self._engine = engine
        self._report = report
        self.environment = environment
        send = engine.channel.send
        self.identity = identity_of(spec.server.tls, f"the gRPC port of {spec.slot}")
        self.transport = AutoTransport(
            engine.memory,
            environment.clock,
            spec.server.kv_transport,
            report.transfers.link,
            partial(ask_worker, dialer=environment.dialer),
            sender=environment.sender,
        )
        self.hosts: HostSenders | None = None
        self._kv_transport = spec.server.kv_transport
        self.health, self.names = health_aio.HealthServicer(), [""]
        self.blocks, self._keys = blocks, keys
        self.blocks.set_role(spec.role)
        self.receivers: HostReceivers | None = None
        self.intake = self._intake(spec, info, environment)
        self.service: RoleService = (
            self._prefill(info, environment) if spec.role == "prefill" else self._decode(spec, info)
        )
        info = msgspec.structs.replace(info, kv_backing=engine.memory.backing)
        progress = EngineProgress(engine.efforts, PATIENCE * spec.steps.stall_s or math.inf)
        self.control = WorkerControl(info, send, self.service, spec.lora.limits, environment.new_id, keys, progress)

    def _intake(self, spec: WorkerSpec, info: WorkerInfo, environment: WorkerEnvironment) -> Intake:
        memory, send, hosts = self._engine.memory, self._engine.channel.send, self._engine.ready.receivers
        if not hosts or spec.role != "decode" or self._kv_transport not in TO_HOSTS:
            return Intake(memory, info.layout, info.fingerprint, send)
        self.receivers = HostReceivers(hosts, environment.dialer)
        own = memory, info.layout, info.fingerprint, send
        return HostIntake(*own, self.receivers.part, self.receivers.others)

    async def wait_host_lost(self) -> str:
        """Returns which other host that receives KV is lost, and why; never where there is none."""
        if self.receivers is None:
            await asyncio.get_running_loop().create_future()
        assert self.receivers is not None
        return await self.receivers.run()

    @property
    def engine_lost(self) -> bool:
        """Returns whether the engine has died, as ``listen`` found."""
        return self._over.is_set()

    async def listen(self) -> None:
        """Handles every message of the engine; returns with ``next_role`` set after a change of role, or
        ``engine_lost`` if the engine died.
        """
        try:
            async for message in self._engine.channel:
                if isinstance(message, ch.RoleIs):
                    self.next_role, self.role_error = message.role, message.error
                    return
                try:
                    self._take(message)
                except Exception:  # one request's trouble must not stop the others
                    log.exception("a %s from the engine was not handled", type(message).__name__)
        except Exception:  # such an engine is as good as dead; its worker would pass for one that was told to stop
            log.exception("the engine can't be heard any more")
        self._over.set()

    def lost(self, error: WorkerLost) -> None:
        """Ends everything in flight with ``error``, because the engine has died."""
        self.blocks.lost(error)
        self.service.lost(error)
        self.control.lost(error)

    async def wait_stuck(self, limit_s: float) -> None:
        """Returns when the engine has been silent for twice ``limit_s`` seconds; after ``limit_s``, health and
        membership say that it is stalled.
        """
        await EngineWatch(self._asked, self._stalls, limit_s, self.control.silent_s).run()

    async def _asked(self) -> None:
        with suppress(WorkerLost):  # ``listen`` hears that too
            await self.control.progress()

    async def _stalls(self, stalls: bool) -> None:
        info, (before, after) = self.control.info, ("ready", "stalled") if stalls else ("stalled", "ready")
        log.warning("the engine of %s is %s", info.worker_id, "silent" if stalls else "back")
        if info.state == before:
            self.control.info = msgspec.structs.replace(info, state=after)
        serving = health_pb2.HealthCheckResponse
        for name in self.names:
            await self.health.set(name, serving.NOT_SERVING if stalls else serving.SERVING)

    async def leave(self, grace_s: float, member: Membership | None) -> bool:
        """Drains the role: tells routers first, then lets requests finish within ``grace_s`` seconds.

        Returns False as soon as the engine dies meanwhile (which ``listen`` hears): no request gets on any more.
        """
        leaving = asyncio.ensure_future(self._leave(grace_s, member))
        lost = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((leaving, lost), return_when=asyncio.FIRST_COMPLETED)
            drained = leaving.done()
        finally:
            lost.cancel()
            leaving.cancel()
            await settled((leaving, lost))
        if drained:
            leaving.result()
        return drained

    async def _leave(self, grace_s: float, member: Membership | None) -> None:
        await self.health.enter_graceful_shutdown()
        if member is not None:
            await member.announce_end(msgspec.structs.replace(self.control.info, state="draining"))
        await self.control.drain(grace_s)
        self.service.hang_up()  # so that routers hear that it leaves before their connections break

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        """Registers the role's gRPC services with ``server``; returns their full names."""
        stubs.add_WorkerServicer_to_server(WorkerShell(self.control, self.blocks.source, self.blocks.pins), server)
        if isinstance(self.service, PrefillService):
            stubs.add_PrefillWorkerServicer_to_server(PrefillShell(self.service), server)
            return ["baton.v1.Worker", "baton.v1.PrefillWorker"]
        assert isinstance(self.service, DecodeService)
        stubs.add_DecodeWorkerServicer_to_server(DecodeShell(self.service, lambda: self.control.info), server)
        server.add_generic_rpc_handlers((handoff_handler(self.intake.accept),))
        return ["baton.v1.Worker", "baton.v1.DecodeWorker"]

    def _take(self, message: ch.ToIo) -> None:
        match message:  # the most frequent first: each class that doesn't fit takes a tenth of a microsecond
            case ch.Tokens() | ch.BlocksReady() | ch.PrefillDone() | ch.PrefillFailed() | ch.CloseReceive():
                self.service.take(message)
            case ch.Admitted() | ch.Committed() | ch.Rearmed() | ch.Refused() | ch.Ended():
                self.service.take(message)
            case ch.Stats():
                self._report.engine.observe(message)
                self.blocks.running(message.running)
                self._report.transfers.refusals(self.intake.refusals)
                self._report.transfers.received(self.intake.received)
            case ch.SnapshotIs():
                self.control.answered(message)
            case ch.Pinned() | ch.KeepAnswer() | ch.Filling() | ch.CacheChanged() | ch.CacheIdle():
                self.blocks.take(message)
            case ch.AdapterIs() | ch.AdapterFailed() | ch.AdaptersAre() | ch.AdaptersChanged():
                self.control.adapters.take(message)
            case ch.EngineReady() | ch.EngineFailed() | ch.RoleIs():
                raise AssertionError(f"{type(message).__name__} is heard before a role begins, or as it ends")
            case _:
                assert_never(message)

    def _prefill(self, info: WorkerInfo, environment: WorkerEnvironment) -> PrefillService:
        engine, sender = self._engine, Sender(info.worker_id, info.model_id, info.fingerprint, info.layout)
        own = self.transport
        receivers = Receivers(own.receivers, own.takes_extents)
        peers = DecodePeers(own.expect, own.layout, self._shipped, self._not_shipped, receivers)
        if senders := engine.ready.senders:
            way = self._kv_transport, environment.dialer, environment.clock
            self.hosts = HostSenders(senders, engine.memory, *way)
        return PrefillService(
            engine.channel.send,
            engine.memory,
            sender,
            self.transport,
            environment.clock,
            peers,
            self.blocks.warmer,
            self._keys,
            self.hosts,
        )

    def _shipped(self, report: HandoffReport) -> None:
        self._report.transfers.completed(self.transport.peer(report.address), report)

    def _not_shipped(self, address: str, error: BatonError, began: float) -> None:
        self._report.transfers.failed(self.transport.peer(address), error, began)

    def _decode(self, spec: WorkerSpec, info: WorkerInfo) -> DecodeService:
        send, warmer = self._engine.channel.send, self.blocks.warmer
        return DecodeService(send, self.intake, info.model_id, spec.steps.lease_ttl_s, warmer, self._keys)


async def serve_grpc(spec: WorkerSpec, worker: RoleRuntime, stack: AsyncExitStack) -> grpc.aio.Server:
    """Binds the ports, registers the services, and starts and returns the server; sets the addresses in
    ``worker.control.info``.

    Raises ConfigError for a port in use.
    """
    own = spec.server
    guards = [NameGuard(names_for(WORKER_CALLS, own.tls.domain), spec.slot)] if own.tls else []
    options = [*server_options(worker.control.info.layout.page_bytes), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options, interceptors=guards)
    warn_of_plaintext(own.host, own.tls)
    names = worker.add_to(server)
    worker.names += names
    health_pb2_grpc.add_HealthServicer_to_server(worker.health, server)
    for name in worker.names:
        await worker.health.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((*names, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
    try:
        port = add_port(server, f"{own.host}:{own.port}", worker.identity)
    except RuntimeError as error:
        raise ConfigError(f"{own.host}:{own.port} can't be bound ({error}); set another port", "port") from None
    data = open_data_ports(spec.slot, spec.slot_dir, own, worker.intake, stack) if spec.role == "decode" else {}
    worker.control.info = msgspec.structs.replace(
        worker.control.info,
        address=f"{own.host}:{port}",
        host_id=this_host(),
        data_addresses=data,
    )
    if worker.receivers is not None:
        stack.push_async_callback(worker.receivers.close)
        worker.control.receivers = await worker.receivers.open(worker.control.info)
    await server.start()
    stack.push_async_callback(worker.transport.close)
    if worker.hosts is not None:
        stack.push_async_callback(worker.hosts.close)
    return server


class CurrentRegistry(Collector):
    """A metrics collector that shows the present role's registry, so that /metrics keeps one port for the process's
    life.
    """

    def __init__(self, present: CollectorRegistry) -> None:
        self.present = present

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics of the present role's registry."""
        return self.present.collect()

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """Returns a view of the present role's registry with the metrics in ``names`` only."""
        return self.present.restricted_registry(names)


def serve_metrics(slot: str, own: ServerSpec, registry: CurrentRegistry, stack: AsyncExitStack) -> str:
    """Serves GET /metrics on a port of its own until ``stack`` closes; returns its host:port, "" if it is off.

    Raises ConfigError for a port in use.
    """
    if not own.metrics:
        return ""
    try:
        identity = identity_of(own.tls, f"the metrics port of {slot}")
        server, thread = start_metrics(own.metrics_port, own.host, registry, identity)
    except OSError as error:
        where = f"{own.host}:{own.metrics_port}"
        text = f"/metrics can't be had at {where} ({error.strerror}): choose another worker.metrics_port"
        raise ConfigError(text, "worker.metrics_port") from None
    stack.callback(_stop_metrics, server, thread)
    return f"{own.host}:{server.server_port}"


def _stop_metrics(server: WSGIServer, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join(1.0)
