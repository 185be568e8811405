"""Handoffs whose pages come in parts, each from the host that has it, over gRPC to a host's real KV sender."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import numpy as np
import pytest

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.layout.extents import part_of
from baton.kv.layout.page import layout_for
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport.loopback import LoopbackTransport
from baton.kv.wire.base import Accept
from baton.prefill_worker.io import host_ways
from baton.prefill_worker.io.divided_handoff import DividedHandoff, OwnHost, Receivers
from baton.prefill_worker.io.handoff import Handoff, HandoffReport
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.prefill_worker.io.host_orders import HostBegin, HostNotSent, encode
from baton.prefill_worker.io.host_senders import HostSenders
from baton.prefill_worker.io.host_ways import HostWays, Way
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import BlocksReceived, Commit, HostSender, ShipBlock
from baton.protos.errors import BatonError, Cancelled, Forbidden, WorkerLost
from baton.protos.nouns import KvReceiver, TokenRun
from baton.tls.rpc import PLAIN
from baton.worker.rank_sender import RankSender

LAYOUT = layout_for("bfloat16", 6, 4, 8)
BLOCKS, TOKEN, LEASE, FIRST = 5, b"t" * 32, b"L" * 16, TokenRun(0, (42,))
TOTAL = BLOCKS * LAYOUT.page_bytes
LAYERS = [part_of(LAYOUT, dict.fromkeys(layers, (0, 4))) for layers in ((0, 1), (2, 3), (4, 5))]
HEADS = [part_of(LAYOUT, dict.fromkeys(range(6), heads)) for heads in ((0, 1), (1, 2), (2, 4))]
TWO = [part_of(LAYOUT, dict.fromkeys(layers, (0, 4))) for layers in ((0, 1, 2), (3, 4, 5))]


class HostWay(LoopbackTransport):
    """A host's way to decode workers of this process; it needs no measuring."""

    def __init__(self, receivers: dict[str, Accept]) -> None:
        super().__init__(receivers)
        self.unreached = set[str]()  # receivers that this host has no way to

    def expect(self, address: str, incarnation: str) -> None:
        """Forgets no route, because there is none to choose."""

    async def meet(self, address: str, incarnation: str) -> None:
        """Raises WorkerLost for a receiver that there is no way to."""
        if address in self.unreached:
            raise WorkerLost(f"no way to ship KV to {address} works", "decode_address")


class Cluster:
    """A decode worker, and a prefill worker of several hosts, each with its own part of every page and no other."""

    def __init__(self, parts: list, address: str = "d0") -> None:
        self.address = address
        self.parts, self.bytes = parts, np.random.default_rng(1).integers(0, 256, TOTAL, np.uint8).tobytes()
        self.memories = [self._memory(part) for part in parts]
        self.pages = PageMemory.create(BLOCKS, LAYOUT.page_bytes)
        self.told: list[object] = []
        self.intake = Intake(self.pages, LAYOUT, "f", self._tell)
        self.hashes = [bytes([at]) * 32 for at in range(BLOCKS)]
        self.lease = IntakeLease(1, LEASE, 1, range(BLOCKS), self.hashes, 0)
        self.intake.register(self.lease)
        self.way, self.far_way = (HostWay({address: self.intake.accept}) for _ in range(2))
        self.far_way.receivers = self.way.receivers
        self.servers: list[grpc.aio.Server] = []
        self.takes_parts, self.epoch = True, 1
        self.receivers: tuple[KvReceiver, ...] = ()
        self.blocks = [ShipBlock(at, at, block, 16) for at, block in enumerate(self.hashes)]

    def _memory(self, part) -> PageMemory:
        """Pages that are wrong but for ``part``."""
        memory = PageMemory.create(BLOCKS, LAYOUT.page_bytes)
        memory.view()[:] = bytes([255]) * TOTAL
        for at in range(BLOCKS):
            page = memoryview(self.bytes)[at * LAYOUT.page_bytes : (at + 1) * LAYOUT.page_bytes]
            whole = np.frombuffer(page, np.uint8)
            for e in part:
                for first in range(e.at, e.at + e.count * max(1, e.stride), max(1, e.stride)):
                    memory.page(at)[first : first + e.bytes] = whole[first : first + e.bytes].tobytes()
        return memory

    def _tell(self, message: object) -> None:
        self.told.append(message)
        if isinstance(message, Commit):
            self.intake.on_committed(message.key, message.epoch)

    def received(self) -> list[int]:
        return sorted(at for each in self.told if isinstance(each, BlocksReceived) for at in each.blocks)

    async def start(self, token: bytes = TOKEN) -> HostSenders:
        """Returns the senders, each other host's behind a port of its own; they accept ``token``."""
        found = [HostSender("", b"", self.parts[0])]
        for memory, part in zip(self.memories[1:], self.parts[1:], strict=True):
            server = grpc.aio.server()
            sender = RankSender(os.dup(memory.fd), token, lambda pages, name: self.far_way)  # type: ignore[arg-type,return-value]
            server.add_generic_rpc_handlers((sender.handlers(),))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            self.servers.append(server)
            found.append(HostSender(f"127.0.0.1:{port}", TOKEN, part))
        return HostSenders(found, self.memories[0], "auto", PLAIN, first_s=60.0)

    async def _takes_parts(self, address: str) -> bool:
        return self.takes_parts

    def to(self) -> Destination:
        return Destination(self.address, LEASE, self.epoch, "r", BLOCKS, 16)

    def handoff(self, senders: HostSenders) -> DividedHandoff:
        sender, to = Sender("p0", "m", "f", LAYOUT), self.to()
        clock = asyncio.get_running_loop().time

        async def plan() -> WirePlan:
            return WirePlan(LAYOUT)

        own = OwnHost(senders.part, lambda to: Handoff(self.way, self.memories[0], sender, to, clock), plan)
        return DividedHandoff(own, senders.others(sender, ""), to, Receivers(self._receivers, self._takes_parts))

    async def _receivers(self, address: str) -> tuple[KvReceiver, ...]:
        return self.receivers


@asynccontextmanager
async def cluster(parts: list, token: bytes = TOKEN) -> AsyncIterator[tuple[Cluster, HostSenders]]:
    made = Cluster(parts)
    senders = await made.start(token)
    try:
        yield made, senders
    finally:
        await senders.close()
        for server in made.servers:
            await server.stop(None)
        await made.way.close()
        await made.far_way.close()
        assert made.intake.open_streams == 0


async def sent(handoff: DividedHandoff, c: Cluster) -> HandoffReport:
    running = asyncio.ensure_future(handoff.run())
    for block in c.blocks:
        handoff.ship([block])
        await asyncio.sleep(0)
    handoff.commit(FIRST, 0)
    return await asyncio.wait_for(running, 60)


async def until(true) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("parts", [TWO, LAYERS, HEADS], ids=["two hosts", "three hosts", "three hosts, by heads"])
async def test_each_host_sends_its_own_part_and_the_pages_are_whole(parts) -> None:
    async with cluster(parts) as (c, senders):
        report = await sent(c.handoff(senders), c)
        assert bytes(c.pages.view()) == c.bytes
        assert report.shipped_bytes == TOTAL
        assert c.received() == list(range(BLOCKS))
        assert sum(isinstance(each, Commit) for each in c.told) == 1


async def test_a_receiver_that_takes_no_parts_gets_whole_pages_of_the_leads_host() -> None:
    async with cluster([TWO[0], TWO[1]]) as (c, senders):
        c.takes_parts = False
        c.memories[0].view()[:] = c.bytes  # as the links between hosts bring them
        await sent(c.handoff(senders), c)
        assert bytes(c.pages.view()) == c.bytes


async def test_the_leads_host_sends_all_where_another_cannot_reach_the_receiver(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(TWO) as (c, senders):
        c.memories[0].view()[:] = c.bytes  # as the links between hosts bring them
        c.memories[1].view()[:] = bytes(TOTAL)
        c.far_way.unreached = {c.address}
        report = await sent(c.handoff(senders), c)
        assert bytes(c.pages.view()) == c.bytes
        assert report.shipped_bytes == TOTAL
        assert "by their worker's own host: no way to ship KV to d0 works" in caplog.text


async def test_no_handoff_waits_while_a_host_that_reached_no_receiver_is_asked_again() -> None:
    asked, now, answers = list[Way](), 0.0, asyncio.Event()

    async def ask(way: Way) -> str:
        asked.append(way)
        if len(asked) == 1:
            return "nobody answers"
        await answers.wait()
        return ""

    ways, way = HostWays(ask, lambda: now), Way("far", "d0", "i")
    assert [await ways.works(way) for _ in range(2)] == [False, False]
    assert len(asked) == 1, "for a while it isn't asked again"
    now = host_ways.AGAIN_S
    assert [await asyncio.wait_for(ways.works(way), 30) for _ in range(3)] == [False] * 3
    await until(lambda: len(asked) == 2)
    answers.set()
    await until(lambda: all(each.done() for each in ways._asked.values()))
    assert [await ways.works(way) for _ in range(2)] == [True, True]
    assert len(asked) == 2, "a way that works is asked for once"
    ways.forget(way)
    assert await ways.works(way)
    assert len(asked) == 3, "but anew once a handoff has failed"
    assert await ways.works(way._replace(incarnation="another"))
    await ways.close()


async def test_no_handoff_waits_long_for_a_hosts_first_answer_and_the_next_hears_it() -> None:
    asked, answers = list[Way](), asyncio.Event()

    async def ask(way: Way) -> str:
        asked.append(way)
        await answers.wait()
        return ""

    ways, way = HostWays(ask, lambda: 0.0, first_s=0.0), Way("far", "d0", "i")
    assert [await asyncio.wait_for(ways.works(way), 30) for _ in range(2)] == [False, False]
    answers.set()
    await until(lambda: all(each.done() for each in ways._asked.values()))
    assert await ways.works(way)
    assert asked == [way], "it was asked once"
    await ways.close()


async def test_the_leads_host_sends_all_where_another_cannot_be_asked() -> None:
    async with cluster(TWO) as (c, senders):
        c.memories[0].view()[:] = c.bytes
        for server in c.servers:
            await server.stop(None)
        await sent(c.handoff(senders), c)
        assert bytes(c.pages.view()) == c.bytes


async def test_a_host_that_is_killed_ends_the_handoff_typed_and_the_next_epoch_keeps_what_was_verified() -> None:
    async with cluster(TWO) as (c, senders):
        handoff = c.handoff(senders)
        running = asyncio.ensure_future(handoff.run())
        handoff.ship(c.blocks[:2])
        await until(lambda: c.received() == [0, 1])
        await c.servers[0].stop(None)
        await until(lambda: c.intake.open_streams < 2)
        handoff.fail(WorkerLost("rank 1 is gone"))
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(running, 60)
        c.epoch = 2
        c.intake.rearm(1, 2)
        again = await c.start()
        for page in range(2):  # they are verified: what comes again doesn't count
            for memory in c.memories:
                memory.page(page)[:] = bytes(LAYOUT.page_bytes)
        await sent(c.handoff(again), c)
        assert bytes(c.pages.view()) == c.bytes
        await again.close()


@pytest.mark.parametrize("blocks", [0, 3])
async def test_a_prompt_that_fails_or_is_cancelled_ends_every_hosts_stream(blocks: int) -> None:
    async with cluster(LAYERS) as (c, senders):
        for cancels in (False, True):
            handoff = c.handoff(senders)
            running = asyncio.ensure_future(handoff.run())
            await until(lambda: c.intake.open_streams == 3)
            handoff.ship(c.blocks[:blocks])
            await until(lambda: len(c.received()) == blocks)
            if cancels:
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            else:
                handoff.fail(Cancelled("it is over"))
                with pytest.raises(Cancelled):
                    await running
            assert c.intake.open_streams == 0, "nobody reads a page once the handoff has ended"
            c.epoch += 1
            c.intake.rearm(1, c.epoch)


async def test_a_host_whose_part_is_not_the_others_rest_is_refused_by_name() -> None:
    async with cluster([TWO[0], LAYERS[2]]) as (c, senders):
        with pytest.raises(BatonError, match="bytes of") as refused:
            await sent(c.handoff(senders), c)
        assert refused.value.param == "extents"


async def test_who_has_not_the_leads_token_gets_nothing_sent() -> None:
    async with cluster(TWO, token=b"x" * 32) as (c, senders):
        (far,) = senders.others(Sender("p0", "m", "f", LAYOUT), "")
        assert not await far.reaches(c.address)
        with pytest.raises(Forbidden, match="only the lead"):
            await far.handoff(c.to(), TWO[1], 0).run((1, 2))
        assert not c.received()


async def test_an_order_that_a_host_does_not_understand_is_named_in_its_answer() -> None:
    async with cluster(TWO) as (c, _):
        sender = RankSender(os.dup(c.memories[1].fd), TOKEN, lambda pages, name: c.far_way)  # type: ignore[arg-type,return-value]
        begin = HostBegin(
            TOKEN, Sender("p0", "m", "f", LAYOUT), c.to(), BLOCKS, LAYOUT.page_bytes, TWO[1], (1, 2), "auto"
        )

        async def orders() -> AsyncIterator[bytes]:
            yield encode(begin)
            yield b"?"
            await asyncio.sleep(60)

        answer = await asyncio.wait_for(sender._sent(orders()), 60)
        assert isinstance(answer, HostNotSent)
        assert "doesn't understand its lead" in answer.error.message
        sender.close()
