"""Checks how a host's KV sender ends a handoff: cancelled, gone, killed; whom it obeys, in plaintext and by TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from baton.engine.backends.ranks.hosts.sender_process import SenderProcess, SenderSpec
from baton.kv.transport.grpc import handoff_handler, server_options
from baton.kv.wire.base import HandoffStream
from baton.prefill_worker.io import host_handoff
from baton.prefill_worker.io.divided_handoff import DividedHandoff
from baton.prefill_worker.io.handoff_frames import Sender
from baton.prefill_worker.io.host_orders import (
    ANSWERS,
    METHOD,
    SERVICE,
    Answer,
    HostNotSent,
    HostReached,
    HostStop,
    encode,
)
from baton.prefill_worker.io.host_senders import HostSenders
from baton.protos import convert
from baton.protos.channel import HostSender
from baton.protos.errors import LeaseUnknown, WorkerLost
from baton.protos.nouns import WorkerInfo
from baton.protos.v1 import worker_pb2, worker_pb2_grpc
from baton.tls.identity import TlsFiles
from baton.tls.rpc import PLAIN, WORKER_CALLS, Dialer, NameGuard, add_port, names_for
from baton.worker import rank_sender
from tests.cancels import ALL, TWICE, Play, enumerate_cancels
from tests.tls.papers import files, identity
from tests.worker.test_rank_sender import FIRST, LAYERS, LAYOUT, TOKEN, TWO, Cluster, cluster, sent, until


def begun(c: Cluster, handoff: DividedHandoff, blocks: int) -> asyncio.Task[object]:
    """Runs ``handoff``, of which the first ``blocks`` are finished; it is committed if these are all."""
    handoff.ship(c.blocks[:blocks])
    if blocks == len(c.blocks):
        handoff.commit(FIRST, 0)
    return asyncio.ensure_future(handoff.run())


@asynccontextmanager
async def handed_off() -> AsyncIterator[Play]:
    async with cluster(LAYERS) as (c, senders):

        async def whole() -> None:
            handoff = c.handoff(senders)
            handoff.ship(c.blocks)
            handoff.commit(FIRST, 0)
            await handoff.run()

        async def at_rest() -> None:
            assert c.intake.open_streams == 0, "nobody reads a page once the handoff has ended"

        yield Play(whole, at_rest)


async def test_a_divided_handoff_that_is_cancelled_twice_is_over_on_every_host() -> None:
    assert await enumerate_cancels(handed_off, [TWICE], every=6)


@pytest.mark.thorough
@pytest.mark.timeout(900)
async def test_a_divided_handoff_may_be_cancelled_at_every_await() -> None:
    assert await enumerate_cancels(handed_off, ALL)


async def reaches(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return encode(HostReached())


@pytest.mark.parametrize("cancels", [False, True])
async def test_pages_stay_the_handoffs_while_a_host_that_broke_off_may_read_them(cancels: bool) -> None:
    leave = asyncio.Event()

    async def breaks_off(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async for said in requests:
            if leave.is_set() or rank_sender.ORDERS.decode(said) == HostStop():
                break
        await context.abort(grpc.StatusCode.UNAVAILABLE, "as a broken connection")
        yield b""

    server = grpc.aio.server()
    calls = {
        "Send": grpc.stream_stream_rpc_method_handler(breaks_off),
        "Reach": grpc.unary_unary_rpc_method_handler(reaches),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with cluster(TWO) as (c, _):
        far = HostSender("", b"", TWO[0]), HostSender(f"127.0.0.1:{port}", TOKEN, TWO[1])
        senders = HostSenders(far, c.memories[0], "auto", PLAIN, first_s=60.0)
        handoff = c.handoff(senders)
        running = begun(c, handoff, 1)
        await until(lambda: c.intake.open_streams == 1)
        if cancels:
            running.cancel()
        else:
            leave.set()
            handoff.ship(c.blocks[1:2])
        await until(lambda: c.intake.open_streams == 0)
        running.cancel()  # which ends no wait for pages that may be read
        assert not (await asyncio.wait({running}, timeout=0.3))[0]
        handoff.fail(WorkerLost("the engine is gone, and its pages with it"))
        assert (await asyncio.wait({running}, timeout=60))[0]
        assert running.cancelled()
        await senders.close()
    await server.stop(None)


async def test_a_handoff_that_fails_waits_for_no_host_that_is_asked_whether_it_reaches_the_receiver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = asyncio.Event()

    async def silent(self: rank_sender.RankSender, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        asked.set()
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(rank_sender.RankSender, "reach", silent)
    async with cluster(TWO) as (c, senders):
        handoff = c.handoff(senders)
        running = begun(c, handoff, 1)
        await asyncio.wait_for(asked.wait(), 60)
        handoff.fail(WorkerLost("the engine is gone, and its pages with it"))
        with pytest.raises(WorkerLost, match="the engine is gone"):
            await asyncio.wait_for(running, 60)
        assert [each.done() for each in senders._ways._asked.values()] == [False], "its host is still asked"
        assert c.told == []


async def test_a_way_is_asked_for_again_once_its_host_lost_the_receiver_and_not_once_that_refused() -> None:
    async with cluster(TWO) as (c, senders):
        (far,), known = senders.others(Sender("p0", "m", "f", LAYOUT), ""), senders._ways._asked
        assert await far.reaches(c.address)
        c.intake.close(1)
        with pytest.raises(LeaseUnknown):
            await asyncio.wait_for(far.handoff(c.to(), TWO[1], 0).run((1, 2)), 60)
        assert len(known) == 1, "the receiver was reached"
        c.far_way.receivers = {}
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(far.handoff(c.to(), TWO[1], 0).run((1, 2)), 60)
        assert not known


@pytest.mark.parametrize("cancels", [False, True], ids=["its lease ends", "it is cancelled"])
async def test_a_way_is_asked_for_again_once_its_host_stood_still_until_the_handoffs_end(cancels: bool) -> None:
    hanging = asyncio.Event()

    async def hang(address: str) -> HandoffStream:
        hanging.set()
        return await asyncio.get_running_loop().create_future()

    async with cluster(TWO) as (c, senders):
        c.far_way.connect = hang  # type: ignore[method-assign]
        running = begun(c, c.handoff(senders), len(c.blocks))
        await asyncio.wait_for(hanging.wait(), 60)
        await until(lambda: c.intake.open_streams == 1)
        assert len(senders._ways._asked) == 1
        if cancels:
            running.cancel()
        else:
            c.intake.close(1)
        with pytest.raises(asyncio.CancelledError if cancels else LeaseUnknown):
            await asyncio.wait_for(running, 60)
        assert not senders._ways._asked


async def test_a_way_stays_known_where_a_prompt_is_cancelled_or_its_handoff_is_taken_over() -> None:
    async with cluster(TWO) as (c, senders):
        running = begun(c, c.handoff(senders), 1)
        await until(lambda: c.received() == [0])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(senders._ways._asked) == 1
        c.epoch += 1
        c.intake.rearm(1, c.epoch)
        await sent(c.handoff(senders), c)
        assert len(senders._ways._asked) == 1


async def test_a_handoff_that_is_taken_over_waits_in_vain_for_no_hosts_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = rank_sender.RankSender._sent

    async def silent(self: rank_sender.RankSender, requests: AsyncIterator[bytes]) -> Answer:
        await answered(self, requests)
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(rank_sender.RankSender, "_sent", silent)
    monkeypatch.setattr(host_handoff, "CONFIRM_S", 0.1)
    async with cluster(TWO) as (c, senders):
        report = await sent(c.handoff(senders), c)
        assert report.shipped_bytes == len(c.bytes)
        assert bytes(c.pages.view()) == c.bytes


@pytest.mark.parametrize(
    "said", [b"what no build says", encode(HostStop()), b""], ids=["bytes", "no begin", "nothing"]
)
async def test_a_stranger_is_refused_in_words_and_let_go_of_in_time(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_sender, "BEGIN_S", 0.1 if not said else 60.0)
    async with cluster(TWO) as (_, senders):
        async with grpc.aio.insecure_channel(senders._others[0].address) as channel:
            call = channel.stream_stream(METHOD)()
            if said:
                await call.write(said)
            answer = ANSWERS.decode(await asyncio.wait_for(call.read(), 60))
            assert isinstance(answer, HostNotSent)
            assert ("only the lead" in answer.error.message) or ("same version" in answer.error.message)


class Describing(worker_pb2_grpc.WorkerServicer):
    """Answers as a decode worker that takes KV by gRPC alone."""

    async def Describe(self, request: object, context: object) -> worker_pb2.WorkerInfo:
        return convert.info_to_pb(
            WorkerInfo("decode-0", "i", "decode", "", "m", "f", LAYOUT, 64, 256, (), 4, takes_extents=True)
        )


@asynccontextmanager
async def processes(tls: TlsFiles | None) -> AsyncIterator[tuple[Cluster, SenderProcess, HostSenders]]:
    """A decode worker's port, and the KV sender of a prefill worker's other host as a process of its own."""
    own = None if tls is None else identity("worker")
    guards = [] if tls is None else [NameGuard(names_for(WORKER_CALLS, tls.domain))]
    server = grpc.aio.server(options=server_options(LAYOUT.page_bytes), interceptors=guards)
    worker_pb2_grpc.add_WorkerServicer_to_server(Describing(), server)
    c = Cluster(TWO, f"127.0.0.1:{add_port(server, '127.0.0.1:0', own)}")
    server.add_generic_rpc_handlers((handoff_handler(c.intake.accept),))
    await server.start()
    process = SenderProcess(SenderSpec("127.0.0.1", tls), TOKEN, c.memories[1].fd)
    try:
        await asyncio.to_thread(process.await_ready)
        far = HostSender("", b"", TWO[0]), HostSender(f"127.0.0.1:{process.port}", TOKEN, TWO[1])
        senders = HostSenders(far, c.memories[0], "auto", Dialer(own), first_s=60.0)
        yield c, process, senders
        await senders.close()
    finally:
        process.kill()
        await c.way.close()
        await server.stop(None)


async def test_a_sender_process_that_encrypts_sends_and_takes_orders_of_a_workers_certificate_alone() -> None:
    tls = files("worker")
    async with processes(tls) as (c, _, senders):
        for dialer in (PLAIN, Dialer(identity("router"))):
            others = HostSenders([senders._own, *senders._others], c.memories[0], "auto", dialer, first_s=60.0)
            (far,) = others.others(Sender("p0", "m", "f", LAYOUT), "")
            assert not await far.reaches(c.address)
            handoff = far.handoff(c.to(), TWO[1], 0)
            handoff.give_up()  # a stranger's host reads none of its pages
            with pytest.raises(WorkerLost, match="is gone"):
                await asyncio.wait_for(handoff.run((1, 2)), 60)
            await others.close()
        await sent(c.handoff(senders), c)
        assert bytes(c.pages.view()) == c.bytes


async def test_a_sender_process_that_is_killed_in_mid_handoff_ends_it_typed() -> None:
    async with processes(None) as (c, process, senders):
        handoff = c.handoff(senders)
        running = begun(c, handoff, 2)
        await until(lambda: c.received() == [0, 1])
        process.process.kill()
        await until(lambda: c.intake.open_streams == 0)
        handoff.fail(WorkerLost("rank 1 is gone"))  # as the session that started it tells the lead
        with pytest.raises(WorkerLost, match="the KV sender of another host"):
            await asyncio.wait_for(running, 60)
