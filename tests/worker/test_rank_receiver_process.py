"""A host's KV receiver as a process of its own: by TCP and TLS, to real transports; killed, and standing still."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import msgspec
import pytest

from baton.decode_worker.io import host_receivers
from baton.engine.backends.ranks.hosts.sender_process import SenderProcess, SenderSpec
from baton.kv.transport.auto import AutoTransport
from baton.kv.transport.grpc import handoff_handler, server_options
from baton.prefill_worker.io.divided_handoff import DividedHandoff, OwnHost, Receivers
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos import convert
from baton.protos.channel import HostSender
from baton.protos.errors import BatonError, StartupError
from baton.protos.nouns import KvReceiver
from baton.protos.v1 import worker_pb2, worker_pb2_grpc
from baton.tls.identity import TlsFiles
from baton.tls.rpc import PLAIN, Dialer
from tests.tls.papers import files, identity
from tests.worker.test_rank_receiver import INFO, ONE, Hosts
from tests.worker.test_rank_sender import BLOCKS, LAYOUT, LEASE, TOKEN, TWO, sent, until

HALF = BLOCKS * LAYOUT.page_bytes // 2


class ByNetwork(Hosts):
    """A decode worker whose other host is a process, which a sender reaches by the transport ``name``."""

    def __init__(self, tls: TlsFiles | None, name: str = "auto") -> None:
        super().__init__(ONE, TWO)
        self.own = None if tls is None else identity("worker")
        self.process = SenderProcess(SenderSpec("127.0.0.1", tls), TOKEN, self.far[0].fd)
        self.network = AutoTransport(self.memories[0], asyncio.get_running_loop().time, name, identity=self.own)

    async def connect(self, dialer: Dialer) -> None:
        await asyncio.to_thread(self.process.await_ready)
        far = HostSender(f"127.0.0.1:{self.process.port}", TOKEN, TWO[1])
        await self.open_to([HostSender("", b"", TWO[0]), far], dialer)

    def one(self) -> DividedHandoff:
        """A handoff by a sender of one host: to the lead in this process, to the other host by the network."""
        sender, to = Sender("p0", "m", "f", LAYOUT), Destination("d0", LEASE, self.epoch, "r", BLOCKS, 16)
        clock = asyncio.get_running_loop().time

        async def plan() -> WirePlan:
            return WirePlan(LAYOUT)

        def handoff(to: Destination) -> Handoff:
            way = self.way if to.address == "d0" else self.network
            return Handoff(way, self.memories[0], sender, to, clock)

        return DividedHandoff(OwnHost((), handoff, plan), (), to, Receivers(self._receivers, self._takes_parts))


@asynccontextmanager
async def by_network(tls: TlsFiles | None = None, name: str = "auto") -> AsyncIterator[ByNetwork]:
    made = ByNetwork(tls, name)
    try:
        await made.connect(PLAIN if made.own is None else Dialer(made.own))
        yield made
    finally:
        made.process.kill()
        if made.loss is not None:
            made.loss.cancel()
            await asyncio.gather(made.loss, return_exceptions=True)
            await made.hosts.close()
        await made.network.close()
        await made.way.close()


@pytest.mark.parametrize(("encrypts", "name"), [(False, "auto"), (False, "grpc"), (True, "tcp"), (True, "grpc")])
async def test_a_process_receives_its_part_by_the_network(encrypts: bool, name: str) -> None:
    async with by_network(files("worker") if encrypts else None, name) as c:
        await sent(c.one(), c)
        c.require_parts()
        assert c.intake.received == {"lead": HALF, c.receivers[1].address: HALF}


class Lead(worker_pb2_grpc.WorkerServicer):
    """Answers Describe as the decode worker's I/O process."""

    def __init__(self) -> None:
        self.receivers: tuple[KvReceiver, ...] = ()

    async def Describe(self, request: object, context: object) -> worker_pb2.WorkerInfo:
        return convert.info_to_pb(msgspec.structs.replace(INFO, receivers=self.receivers))


@pytest.mark.parametrize("reachable", [True, False])
async def test_a_sender_learns_by_describe_what_goes_where_and_sends_all_to_the_lead_where_it_must(
    reachable: bool,
) -> None:
    async with by_network() as c:
        server, lead = grpc.aio.server(options=server_options(LAYOUT.page_bytes)), Lead()
        worker_pb2_grpc.add_WorkerServicer_to_server(lead, server)
        server.add_generic_rpc_handlers((handoff_handler(c.intake.accept),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        far = c.receivers[1] if reachable else KvReceiver("127.0.0.1:1", TWO[1])
        lead.receivers = KvReceiver(address, TWO[0]), far
        sender, to = Sender("p0", "m", "f", LAYOUT), Destination(address, LEASE, 1, "r", BLOCKS, 16)
        clock = asyncio.get_running_loop().time

        async def plan() -> WirePlan:
            return WirePlan(LAYOUT)

        own = OwnHost((), lambda to: Handoff(c.network, c.memories[0], sender, to, clock), plan)
        receivers = Receivers(c.network.receivers, c.network.takes_extents)
        await sent(DividedHandoff(own, (), to, receivers), c)
        if reachable:
            c.require_parts()
        else:
            assert bytes(c.pages.view()) == c.bytes
        await server.stop(None)


async def test_a_process_obeys_a_workers_certificate_alone() -> None:
    c = ByNetwork(files("worker"))
    try:
        with pytest.raises(StartupError, match="worker's ranks"):
            await c.connect(Dialer(identity("router")))
    finally:
        c.process.kill()
        await c.network.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_dies_or_stands_still_is_a_lost_host(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_receivers, "PING_S", 0.1)
    async with by_network() as c:
        running = asyncio.ensure_future((handoff := c.one()).run())
        handoff.ship(c.blocks[:2])
        await until(lambda: c.received() == [0, 1])
        monkeypatch.setattr(host_receivers, "SILENT_S", 0.5)  # not earlier: a busy machine stands still, too
        os.kill(c.process.process.pid, number)
        handoff.ship(c.blocks[2:])
        assert c.loss is not None
        assert "is lost" in await asyncio.wait_for(c.loss, 60)
        c.intake.close(1)
        running.cancel()
        with pytest.raises((asyncio.CancelledError, BatonError)):
            await running
        assert c.received() == [0, 1], "nothing counts that another host hasn't verified"
