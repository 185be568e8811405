"""Tests the ends of handoffs to several hosts of a decode worker: before they began, or with a connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest

from baton.decode_worker.io import host_receivers
from baton.decode_worker.io.host_intake import HELD
from baton.decode_worker.io.host_receivers import HostReceiver, HostReceivers
from baton.decode_worker.io.receiver_orders import OrderDone, Ping, encode
from baton.kv.wire import control
from baton.kv.wire.base import Sink
from baton.kv.wire.frames import Frame, Kind
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos import convert
from baton.protos.channel import Commit, HostSender, ReceiveClosed
from baton.protos.errors import HandoffRefused, LayoutMismatch, StartupError, WorkerLost
from baton.protos.nouns import Extent, WorkerInfo
from baton.tls.rpc import PLAIN
from baton.worker import host
from tests.worker.test_rank_receiver import INFO, ONE, WHOLE, Hosts, Replies, hosts
from tests.worker.test_rank_sender import BLOCKS, FIRST, LAYOUT, LEASE, TOKEN, TWO, sent, until

BAD = {
    "of a larger page": Extent(0, 64, LAYOUT.page_bytes, 64),
    "behind the page": Extent(LAYOUT.page_bytes + (1 << 30), 1 << 20, 0, 1),
    "too long": Extent(0, LAYOUT.page_bytes + 1, 0, 1),
    "of numbers that no page has": Extent((1 << 64) - 1, 1, 0, 1),
    "on itself": Extent(0, 64, 8, 4),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_a_host_that_asks_for_what_is_not_of_a_page_gets_nothing(bad: Extent) -> None:
    async with hosts(TWO, TWO) as (c, handoff):
        wrong = msgspec.structs.replace(c.receivers[1], part=(bad,))
        said = msgspec.structs.replace(INFO, receivers=(c.receivers[0], wrong))
        c.receivers = convert.info_from_pb(convert.info_to_pb(said)).receivers
        with pytest.raises(LayoutMismatch, match="page"):
            await sent(handoff(), c)
        assert not c.told


async def test_a_decode_worker_of_more_hosts_than_there_may_be_gets_nothing() -> None:
    async with hosts(TWO, TWO) as (c, handoff):
        c.receivers = c.receivers * 64
        with pytest.raises(LayoutMismatch, match="128 hosts"):
            await sent(handoff(), c)
        assert not c.told


async def test_a_decode_worker_whose_hosts_ask_for_less_than_a_page_gets_nothing() -> None:
    async with hosts(TWO, TWO) as (c, handoff):
        c.receivers = (msgspec.structs.replace(c.receivers[0], part=TWO[1]),)
        with pytest.raises(LayoutMismatch, match=f"{LAYOUT.page_bytes // 2} bytes of each page") as refused:
            await sent(handoff(), c)
        assert refused.value.param == "receivers"
        assert not c.told


class LateReader:
    """A call whose host answers each order at once, but whose answers take some turns of the loop to be read, as a
    socket's do; ``silent`` has it answer none.
    """

    def __init__(self) -> None:
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.silent, self.written = False, asyncio.Event()

    async def write(self, order: bytes) -> None:
        if not self.silent:
            self.answers.put_nowait(encode(OrderDone()))
        self.written.set()

    async def read(self) -> bytes:
        said = await self.answers.get()
        for _ in range(10):
            await asyncio.sleep(0)
        return said


async def test_a_lead_that_stood_still_itself_reads_what_a_host_answered_before_it_calls_it_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_receivers, "PING_S", 0.01)
    monkeypatch.setattr(host_receivers, "SILENT_S", 0.05)
    host = HostReceiver(HostSender("far", TOKEN, TWO[1]), PLAIN)
    host._call = call = LateReader()  # type: ignore[assignment]
    running = asyncio.ensure_future(host.run())
    await asyncio.wait_for(call.written.wait(), 60)
    answered = asyncio.Event()
    host.send(Ping())
    host.when_done(answered.set)
    call.written.clear()
    await call.written.wait()
    time.sleep(0.2)  # the whole process: longer than a host may be silent
    await asyncio.wait([running, asyncio.ensure_future(answered.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert not running.done(), "the answer lay there"
    call.silent = True
    assert "is lost: it has answered no order" in await asyncio.wait_for(running, 60)


@pytest.mark.parametrize("first", [0, 1], ids=["the lead", "another host"])
async def test_a_stream_that_comes_after_those_to_another_host_have_ended_does_not_stay(first: int) -> None:
    async with hosts(ONE, TWO) as (c, _):
        lines, intakes = [Replies(), Replies()], (c.intake, c.ports[0])

        def opened(host: int) -> Sink:
            sink = intakes[host].accept(lines[host])
            of = control.Opening("r", LAYOUT, "p0", BLOCKS, 16, "m", "f", extents=TWO[host], receivers=2)
            sink.take(Frame(Kind.OPEN, LEASE, 1, control.encode_opening(of)))
            return sink

        opened(first).over(WorkerLost("the sender is gone"))
        await until(lambda: any(isinstance(each, ReceiveClosed) for each in c.told))
        await c.known()
        opened(1 - first)
        await until(lambda: c.streams() == 0)
        await until(lambda: c.epochs() == {})
        assert lines[1 - first].refusal().param == "shard_rank"


async def test_the_only_stream_of_a_handoff_waits_for_no_other_to_say_why_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(self: Handoff, wire: WirePlan) -> None:
        raise HandoffRefused("the stream of another shard of these blocks has ended", "shard_rank")

    monkeypatch.setattr(Handoff, "run", run)
    async with hosts(ONE, TWO) as (c, handoff):
        c.receivers = (msgspec.structs.replace(c.receivers[0], part=WHOLE),)
        with pytest.raises(HandoffRefused, match="another shard"):
            await sent(handoff(), c)


async def test_other_hosts_take_no_stream_once_the_engine_hears_of_a_commit_of_whole_pages() -> None:
    async with hosts(ONE, TWO) as (c, handoff):
        late, tell = Replies(), c._tell

        def told(message: object) -> None:
            if isinstance(message, Commit):
                of = control.Opening("r", LAYOUT, "p0", BLOCKS, 16, "m", "f", extents=TWO[1], receivers=2)
                c.ports[0].accept(late).take(Frame(Kind.OPEN, LEASE, 1, control.encode_opening(of)))
            tell(message)

        c.intake._engine = told
        c.receivers = ()
        await sent(handoff(), c)
        assert late.refusal().label == "lease_unknown"
        c.intake.close(1)
        await until(lambda: c.streams() == 0 and c.epochs() == {})


async def test_the_next_epoch_goes_to_all_hosts_after_a_commit_of_whole_pages_that_came_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosts(TWO, TWO) as (c, handoff):
        waits = list[Callable[[], None]]()
        monkeypatch.setattr(c.hosts.others[0], "when_done", waits.append)
        receivers, c.receivers, c.takes_parts = c.receivers, (), False
        memory = c.memories[0]
        memory.view()[:] = c.bytes
        (whole := handoff()).ship(c.blocks)
        whole.commit(FIRST, 0)
        running = asyncio.ensure_future(whole.run())
        await until(lambda: waits)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: c.epochs() == {})
        monkeypatch.undo()
        for then in waits:
            c.hosts.others[0].when_done(then)
        await c.known()
        assert not any(isinstance(each, Commit) for each in c.told), "its sender is gone"
        c.receivers, c.takes_parts = receivers, True
        await c.rearm()
        await sent(handoff(), c)
        assert sum(isinstance(each, Commit) for each in c.told) == 1


async def test_orders_are_obeyed_of_the_lead_alone_and_nothing_is_received_without_one() -> None:
    c = Hosts(ONE, TWO)
    with pytest.raises(StartupError, match=r"receives nothing for it: only the lead"):
        await c.begin(b"x" * 32)
    await c.hosts.close()
    line = Replies()
    c.ports[0].accept(line)
    assert line.refusal().label == "lease_unknown"
    for server in c.servers:
        await server.stop(None)


async def test_a_start_says_which_of_several_hosts_does_not_answer_and_waits_for_none_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert host_receivers.BEGIN_S < host.OPEN_S
    monkeypatch.setattr(host_receivers, "BEGIN_S", 0.2)
    silent = [await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) for _ in range(3)]
    at = [f"127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in silent]
    c = HostReceivers([HostSender("", b"", TWO[0]), *(HostSender(each, TOKEN, TWO[1]) for each in at)], PLAIN)
    tried = list[str]()
    opens = HostReceiver.open

    async def noted(self: HostReceiver, info: WorkerInfo, hosts: int) -> None:
        tried.append(self.address)
        await opens(self, info, hosts)

    monkeypatch.setattr(HostReceiver, "open", noted)
    with pytest.raises(StartupError, match=rf"{at[0]}.*answer") as failed:
        await c.open(INFO)
    assert failed.value.param == "worker.rank_hosts"
    assert tried == at, "side by side"
    await c.close()
    for each in silent:
        each.close()


async def test_connections_that_were_never_opened_are_closed_without_hiding_why() -> None:
    await HostReceivers([HostSender("", b"", TWO[0]), HostSender("127.0.0.1:1", TOKEN, TWO[1])], PLAIN).close()


async def test_a_host_that_fails_an_order_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosts(ONE, TWO) as (c, _):

        def fails(*order: object) -> None:
            raise HandoffRefused("a bug of ours")

        monkeypatch.setattr(c.ports[0], "_do", fails)
        c.intake.close(1)
        assert c.loss is not None
        assert "is lost" in await asyncio.wait_for(c.loss, 60)
        assert c.epochs()[HELD] == 1, "its pages stay held, until the worker ends"
