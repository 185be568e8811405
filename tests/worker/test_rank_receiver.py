"""Handoffs to a decode worker whose ranks are on several hosts: each host gets what its ranks read, by orders over
gRPC to a host's real KV receiver.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
import numpy as np
import pytest

from baton.decode_worker.io.host_intake import HELD, HostIntake
from baton.decode_worker.io.host_receivers import HostReceivers
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.decode_worker.io.receiver_orders import Ping
from baton.kv.layout.bridge import bridge
from baton.kv.layout.extents import Part, common, gather, part_bytes, part_of, scatter
from baton.kv.layout.page import in_pages_of, layout_for
from baton.kv.layout.repaging import Repaging
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import control, frames
from baton.kv.wire.frames import Frame, Kind
from baton.prefill_worker.io.divided_handoff import DividedHandoff, OwnHost, Receivers
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import BlocksReceived, Commit, HostSender, ReceiveClosed, ReceiveOpened, ShipBlock
from baton.protos.errors import BatonError, WorkerLost
from baton.protos.nouns import Extent, WorkerInfo
from baton.tls.rpc import PLAIN, Dialer
from baton.worker.rank_receiver import RankReceiver
from tests.cancels import ALL, TWICE, Play, enumerate_cancels
from tests.worker.test_rank_sender import (
    BLOCKS,
    FIRST,
    HEADS,
    LAYERS,
    LAYOUT,
    LEASE,
    TOKEN,
    TOTAL,
    TWO,
    Cluster,
    sent,
    until,
)

WHOLE: Part = (Extent(0, LAYOUT.page_bytes, 0, 1),)
HALVES = [part_of(LAYOUT, dict.fromkeys(range(6), heads)) for heads in ((0, 2), (2, 4))]
SHARED = [part_of(LAYOUT, dict.fromkeys(range(6), heads)) for heads in ((0, 3), (1, 4))]  # heads on both hosts
LATENTS = [WHOLE, WHOLE]  # every rank reads all, as of latents or with experts dealt
INFO = WorkerInfo("d", "i", "decode", "d0", "m", "f", LAYOUT, 64, 256, (), BLOCKS, takes_extents=True)


class Hosts(Cluster):
    """A decode worker of as many hosts as ``reads`` has parts, and a prefill worker of as many as ``parts``."""

    def __init__(self, parts: list[Part], reads: list[Part]) -> None:
        super().__init__(parts)
        self.reads = reads
        self.far = [PageMemory.create(BLOCKS, LAYOUT.page_bytes) for _ in reads[1:]]
        self.ports: list[RankReceiver] = []
        self.loss: asyncio.Task[str] | None = None

    async def begin(self, token: bytes = TOKEN) -> None:
        hosts = [HostSender("", b"", self.reads[0])]
        for memory, part in zip(self.far, self.reads[1:], strict=True):
            server = grpc.aio.server()
            receiver = RankReceiver(token, lambda pages, size, own=memory: own, lambda _: "nowhere")
            server.add_generic_rpc_handlers((receiver.handlers(),))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            self.servers.append(server)
            self.ports.append(receiver)
            self.way.receivers[f"127.0.0.1:{port}"] = receiver.accept
            hosts.append(HostSender(f"127.0.0.1:{port}", TOKEN, part, f"far-{len(hosts)}:7711"))
        await self.open_to(hosts, PLAIN)

    async def open_to(self, hosts: list[HostSender], dialer: Dialer) -> None:
        """Connects the lead to ``hosts``, its own first, and registers the lease on all."""
        self.hosts = HostReceivers(hosts, dialer)
        self.intake = HostIntake(self.pages, LAYOUT, "f", self._tell, self.hosts.part, self.hosts.others)
        self.way.receivers["d0"] = self.intake.accept
        self.receivers = await self.hosts.open(INFO)
        self.loss = asyncio.ensure_future(self.hosts.run())
        self.lease = IntakeLease(1, LEASE, 1, range(BLOCKS), self.hashes, 0)
        self.intake.register(self.lease)
        await self.known()

    async def known(self) -> None:
        heard = asyncio.Event()
        self.intake.when_known(1, heard.set)
        await asyncio.wait_for(heard.wait(), 60)

    async def rearm(self) -> None:
        self.epoch += 1
        self.intake.rearm(1, self.epoch)
        await self.known()

    def streams(self) -> int:
        """Streams that may write, on all hosts."""
        far = sum(port._intake.open_streams for port in self.ports if port._intake is not None)
        return self.intake.open_streams + far

    def epochs(self) -> dict[int, int]:
        """Returns what the engine believes to be open: openings less ends, by epoch."""
        found: dict[int, int] = {}
        for said in self.told:
            if isinstance(said, ReceiveOpened | ReceiveClosed):
                found[said.epoch] = found.get(said.epoch, 0) + (1 if isinstance(said, ReceiveOpened) else -1)
        return {epoch: count for epoch, count in found.items() if count}

    def require_parts(self, blocks: int = BLOCKS) -> None:
        """Asserts that each host has its part of the first ``blocks`` pages, and nothing else was written."""
        for memory, part in zip([self.pages, *self.far], self.reads, strict=True):
            for at in range(BLOCKS):
                whole = memoryview(self.bytes)[at * LAYOUT.page_bytes : (at + 1) * LAYOUT.page_bytes]
                wanted = bytearray(LAYOUT.page_bytes)
                if at < blocks:
                    scatter(gather(whole, part), memoryview(wanted), part)
                assert bytes(memory.page(at)) == wanted, f"page {at}"


@asynccontextmanager
async def hosts(parts: list[Part], reads: list[Part]) -> AsyncIterator[tuple[Hosts, Callable[[], DividedHandoff]]]:
    made = Hosts(parts, reads)
    senders = await made.start()
    await made.begin()
    assert made.loss is not None
    try:
        yield made, lambda: made.handoff(senders)
    finally:
        made.loss.cancel()
        await asyncio.gather(made.loss, return_exceptions=True)
        await made.hosts.close()
        await senders.close()
        for server in made.servers:
            await server.stop(None)
        await made.way.close()
        await made.far_way.close()


ONE = [WHOLE]
WIDTHS = {
    "one to two stages": (ONE, TWO),
    "one to three stages": (ONE, LAYERS),
    "two stages to three": (TWO, LAYERS),
    "three stages to two": (LAYERS, TWO),
    "stages to heads": (TWO, HALVES),
    "heads to stages": (HEADS, TWO),
    "three by heads to two": (HEADS, HALVES),
    "heads that two hosts read": (TWO, SHARED),
    "latents": (TWO, LATENTS),
}


@pytest.mark.parametrize(("parts", "reads"), WIDTHS.values(), ids=WIDTHS)
async def test_each_host_gets_what_its_ranks_read_and_nothing_else(parts: list[Part], reads: list[Part]) -> None:
    async with hosts(parts, reads) as (c, handoff):
        report = await sent(handoff(), c)
        c.require_parts()
        assert report.shipped_bytes == TOTAL
        assert c.received() == list(range(BLOCKS))
        landed = [each for each in c.told if isinstance(each, BlocksReceived)]
        assert all(each.resident == each.blocks for each in landed), "each host has its own part"
        assert sum(isinstance(each, Commit) for each in c.told) == 1
        assert c.intake.received_bytes == BLOCKS * part_bytes(reads[0])
        names = ["lead", *(f"far-{number}:7711" for number in range(1, len(reads)))]
        assert c.intake.received == {
            name: BLOCKS * part_bytes(part) for name, part in zip(names, reads, strict=True)
        }
        await until(lambda: not c.streams() and c.epochs() == {})


@pytest.mark.parametrize("reads", [TWO, HALVES], ids=["stages", "heads"])
async def test_pages_of_another_dtype_are_converted_and_each_host_gets_its_part(reads: list[Part]) -> None:
    theirs = layout_for("float32", 6, 4, 8)
    async with hosts(ONE, reads) as (c, _):
        memory = PageMemory.create(BLOCKS, theirs.page_bytes)
        values = np.random.default_rng(2).standard_normal(BLOCKS * theirs.page_bytes // 4).astype(np.float32)
        memory.view()[:] = values.tobytes()
        made = bridge(theirs, LAYOUT)
        c.bytes = b"".join(bytes(made.convert(memory.page(at))) for at in range(BLOCKS))
        sender, to = Sender("p0", "m", "f", theirs), Destination("d0", LEASE, 1, "r", BLOCKS, 16)
        clock = asyncio.get_running_loop().time

        async def plan() -> WirePlan:
            return WirePlan(LAYOUT, bridge(theirs, LAYOUT), tuple(c.hashes))

        own = OwnHost(TWO[0], lambda to: Handoff(c.way, memory, sender, to, clock), plan)
        await sent(DividedHandoff(own, (), to, Receivers(c._receivers, c._takes_parts)), c)
        c.require_parts()


@pytest.mark.parametrize("reads", [TWO, HALVES], ids=["stages", "heads"])
async def test_blocks_of_another_size_are_regrouped_and_each_host_gets_its_part(reads: list[Part]) -> None:
    ours = in_pages_of(LAYOUT, 32)
    async with hosts(ONE, reads) as (c, _):
        memory = PageMemory.create(-(-BLOCKS // 2), ours.page_bytes)
        memory.view()[: len(c.bytes)] = c.bytes
        c.blocks = [ShipBlock(at, at, bytes([99]) * 32, 32) for at in range(memory.pages)]
        sender, to = Sender("p0", "m", "f", ours), Destination("d0", LEASE, 1, "r", memory.pages, 16)
        clock = asyncio.get_running_loop().time

        async def plan() -> WirePlan:
            return WirePlan(LAYOUT, bridge(ours, LAYOUT), tuple(c.hashes), Repaging(ours, LAYOUT, 16 * BLOCKS))

        own = OwnHost((), lambda to: Handoff(c.way, memory, sender, to, clock), plan)
        await sent(DividedHandoff(own, (), to, Receivers(c._receivers, c._takes_parts)), c)
        c.require_parts()


async def test_the_leads_host_sends_to_each_receiver_where_another_cannot_reach_one_that_wants_its_part() -> None:
    async with hosts(TWO, HALVES) as (c, handoff):
        c.memories[0].view()[:] = c.bytes
        c.memories[1].view()[:] = bytes(TOTAL)
        c.far_way.unreached = {c.receivers[1].address}
        await sent(handoff(), c)
        c.require_parts()
        assert {each: size > 0 for each, size in c.intake.received.items()} == {"lead": True, "far-1:7711": True}


async def test_a_receiver_that_wants_nothing_of_a_host_need_not_be_reached_from_there() -> None:
    async with hosts(TWO, TWO) as (c, handoff):
        c.far_way.unreached = {"d0"}
        await sent(handoff(), c)  # of the pages of the lead's host, half are wrong
        c.require_parts()


async def test_a_host_that_is_lost_ends_the_handoff_typed_and_is_told_of() -> None:
    async with hosts(TWO, TWO) as (c, handoff):
        running = asyncio.ensure_future((divided := handoff()).run())
        divided.ship(c.blocks[:2])
        await until(lambda: c.received() == [0, 1])
        await c.servers[-1].stop(None)
        assert c.loss is not None
        assert "is lost" in await asyncio.wait_for(c.loss, 60)
        with pytest.raises(BatonError):
            await asyncio.wait_for(running, 60)
        await until(lambda: c.intake.open_streams == 0)


async def test_the_next_epoch_keeps_what_each_host_has_verified() -> None:
    async with hosts(TWO, HALVES) as (c, handoff):
        first = handoff()
        running = asyncio.ensure_future(first.run())
        first.ship(c.blocks[:2])
        await until(lambda: c.received() == [0, 1])
        first.fail(WorkerLost("the prefill worker's engine is gone"))
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(running, 60)
        await until(lambda: not c.streams() and c.epochs() == {})
        await c.rearm()
        for memory in c.memories:  # what is verified is kept, whatever comes again
            for page in range(2):
                memory.page(page)[:] = bytes(LAYOUT.page_bytes)
        await sent(handoff(), c)
        c.require_parts()
        assert c.received() == list(range(BLOCKS))


async def test_whole_pages_of_an_older_sender_take_over_from_parts_and_the_other_way_round() -> None:
    async with hosts(ONE, TWO) as (c, handoff):
        first = handoff()
        running = asyncio.ensure_future(first.run())
        first.ship(c.blocks[:1])
        await until(lambda: c.received() == [0])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: not c.streams())
        receivers, c.receivers = c.receivers, ()
        await c.rearm()
        second = handoff()
        running = asyncio.ensure_future(second.run())
        second.ship(c.blocks[:3])
        await until(lambda: c.received() == [0, 1, 2])
        assert bytes(c.pages.page(1)) == c.bytes[LAYOUT.page_bytes : 2 * LAYOUT.page_bytes]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: not c.streams())
        c.receivers = receivers
        await c.rearm()
        await sent(handoff(), c)
        told = {block: each for each in c.told if isinstance(each, BlocksReceived) for block in each.blocks}
        assert sorted(told) == list(range(BLOCKS))
        assert [bool(told[block].resident) for block in range(BLOCKS)] == [True, False, False, True, True]
        for block in (0, 3, 4):
            part = gather(memoryview(c.bytes)[block * LAYOUT.page_bytes : (block + 1) * LAYOUT.page_bytes], TWO[1])
            assert gather(c.far[0].page(block), TWO[1]) == part


async def test_a_cancelled_lease_is_held_until_every_host_has_confirmed_that_nobody_writes_it() -> None:
    async with hosts(TWO, LAYERS) as (c, handoff):
        divided = handoff()
        running = asyncio.ensure_future(divided.run())
        divided.ship(c.blocks[:1])
        await until(lambda: c.received() == [0])
        c.intake.close(1)
        assert c.epochs()[HELD] == 1, "before the engine can be told of the cancel"
        await until(lambda: c.epochs() == {} and not c.streams())
        with pytest.raises(BatonError):
            await asyncio.wait_for(running, 60)
        for memory in c.memories:
            memory.view()[:] = bytes(len(memory.view()))
        with pytest.raises(BatonError):
            await sent(handoff(), c)
        c.require_parts(1)


async def test_a_part_that_is_damaged_on_its_way_to_another_host_ends_all_streams() -> None:
    async with hosts(ONE, TWO) as (c, _):
        line = Replies()
        sink = c.ports[0].accept(line)
        payload = bytes(part_bytes(TWO[1]))
        opening = control.Opening("r", LAYOUT, "p0", BLOCKS, 16, "m", "f", extents=TWO[1], receivers=2)
        sink.take(Frame(Kind.OPEN, LEASE, 1, control.encode_opening(opening)))
        await until(lambda: c.epochs() == {1: 1})
        block = frames.Block(0, c.hashes[0], 1)
        frame = Frame(Kind.BLOCK, LEASE, 1, unit=len(payload), blocks=(block,))
        places = sink.place(frame)
        assert places is not None
        sink.landed(frame, [2])
        assert line.refusal().label == "corrupt_frame"
        await until(lambda: c.epochs() == {})
        for _ in range(2):  # each order is answered after what was refused before it
            c.hosts.others[0].send(Ping())
            await c.known()
        assert c.intake.refusals == {"corrupt_frame": 1}
        assert not c.received()


class Replies:
    """Collects what a receiver replies."""

    def __init__(self) -> None:
        self.said: list[bytes] = []

    def reply(self, frame: bytes) -> None:
        self.said.append(frame)

    def end(self) -> None:
        """Ignores the call, because this engine keeps nothing to close."""

    def refusal(self) -> BatonError:
        return control.decode_error(frames.decode(self.said[-1]).body)


@pytest.mark.parametrize(
    ("receivers", "extents", "label"),
    [(0, TWO[1], "receivers"), (3, TWO[1], "receivers"), (2, (), "receivers"), (2, TWO[0], "extents")],
    ids=["whole pages", "of another number of hosts", "no part", "another host's part"],
)
async def test_what_does_not_go_to_a_host_is_refused_before_a_byte_is_placed(
    receivers: int, extents: Part, label: str
) -> None:
    async with hosts(ONE, TWO) as (c, _):
        line = Replies()
        opening = control.Opening("r", LAYOUT, "p0", BLOCKS, 16, "m", "f", extents=extents, receivers=receivers)
        c.ports[0].accept(line).take(Frame(Kind.OPEN, LEASE, 1, control.encode_opening(opening)))
        assert line.refusal().param == label
        assert c.streams() == 0


@asynccontextmanager
async def handed_off() -> AsyncIterator[Play]:
    async with hosts(TWO, HALVES) as (c, handoff):

        async def whole() -> None:
            divided = handoff()
            divided.ship(c.blocks)
            divided.commit(FIRST, 0)
            await divided.run()

        async def at_rest() -> None:
            await until(lambda: not c.streams() and c.epochs() == {})

        yield Play(whole, at_rest)


async def test_a_handoff_to_several_hosts_that_is_cancelled_twice_is_over_on_each() -> None:
    assert await enumerate_cancels(handed_off, [TWICE], every=9)


@pytest.mark.thorough
@pytest.mark.timeout(900)
async def test_a_handoff_to_several_hosts_may_be_cancelled_at_every_await() -> None:
    assert await enumerate_cancels(handed_off, ALL)


def test_parts_have_their_bytes_in_common_whatever_they_are() -> None:
    size = LAYOUT.page_bytes
    for one in (*TWO, *LAYERS, *HEADS, *HALVES, WHOLE):
        for other in (*TWO, *HEADS, *SHARED):
            both = common(one, other, size)
            page = memoryview(os.urandom(size))
            twice = [bytearray(size) for _ in range(2)]
            for part, into in ((both, twice[0]), (one, twice[1])):
                if part:
                    scatter(gather(page, part), memoryview(into), part)
            wanted = bytearray(size)
            scatter(gather(memoryview(bytes(twice[1])), other), memoryview(wanted), other)
            assert twice[0] == wanted
            assert part_bytes(both) <= min(part_bytes(one), part_bytes(other))
            assert len(both) <= 24, "heads of all tokens and layers are few ranges"
