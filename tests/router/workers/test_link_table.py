"""Tests links: up and down by their own connection, reconnecting, and never mistaking one incarnation for
another.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys

import msgspec
import pytest

from baton.protos import version
from baton.protos.errors import BatonError, Draining, WorkerLost
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.router.workers.decode_session import DecodeLease, DecodeSession
from baton.router.workers.link import DecodeLink, PrefillLink, WorkerLink
from baton.router.workers.link_table import LinkTable
from tests.router.fake_prefill import FakePrefill
from tests.router.fake_services import FakeDecode, held_port, info
from tests.router.fake_workers import cluster, until


class Watched:
    """Links with a record of what is up."""

    def __init__(self) -> None:
        self.changes = 0
        self.links = LinkTable("router", self.changed, random.Random(1))

    def changed(self) -> None:
        self.changes += 1

    def up(self) -> set[str]:
        return {k.info.worker_id for k in self.links if k.up}


@pytest.fixture
async def watched():
    made = Watched()
    yield made
    await made.links.close()
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith(("link", "session"))]


@pytest.fixture(params=[FakeDecode, FakePrefill], ids=["decode", "prefill"])
async def worker(request):
    made = request.param("w")
    await made.start()
    yield made
    await made.die()


async def test_a_link_comes_up_and_goes_down_with_its_worker(watched, worker):
    watched.links.sync({"w": worker.info})
    await until(lambda: watched.up() == {"w"})
    await worker.die()
    await until(lambda: not watched.up(), 20)
    assert watched.changes == 2


async def test_a_link_comes_back_when_the_same_incarnation_does(watched, worker):
    await worker.die()
    with held_port() as port:
        await worker.start(port)
        watched.links.sync({"w": worker.info})
        await until(lambda: watched.up() == {"w"})
        await worker.die()
        await until(lambda: not watched.up())
        await worker.start(port)
        await until(lambda: watched.up() == {"w"})


async def test_another_incarnation_on_the_same_port_is_not_taken_for_the_old_one(watched, worker):
    told = worker.info
    worker.info = msgspec.structs.replace(told, incarnation="w-2")
    watched.links.sync({"w": told})
    await asyncio.sleep(0.3)
    assert not watched.up()
    watched.links.sync({"w": worker.info})
    await until(lambda: watched.up() == {"w"})


@pytest.mark.parametrize("protocol", ["2.0", "1.3", "0.9", ""])
async def test_a_worker_more_than_one_version_apart_is_refused_by_name(
    watched, worker, protocol, monkeypatch, caplog
):
    monkeypatch.setattr(version, "PROTOCOL", "1.1")
    told = worker.info
    worker.info = msgspec.structs.replace(told, protocol=protocol, version="7.8.9")
    watched.links.sync({"w": told})
    await until(lambda: "run together" in caplog.text)
    assert not watched.up()
    assert f"w (baton 7.8.9) speaks protocol {protocol or 'unknown'}" in caplog.text


@pytest.mark.parametrize("protocol", ["1.0", "1.1", "1.2"])
async def test_a_worker_one_version_apart_is_used(watched, worker, protocol, monkeypatch):
    monkeypatch.setattr(version, "PROTOCOL", "1.1")
    told = worker.info
    worker.info = msgspec.structs.replace(told, protocol=protocol)
    watched.links.sync({"w": told})
    await until(lambda: watched.up() == {"w"})


async def test_a_worker_that_redis_forgot_stays_while_its_link_is_up(watched, worker):
    watched.links.sync({"w": worker.info})
    await until(lambda: watched.up() == {"w"})
    watched.links.sync({})
    assert watched.up() == {"w"}
    await worker.die()
    await until(lambda: not watched.up())
    watched.links.sync({})
    assert not list(watched.links)


async def test_a_new_incarnation_replaces_the_old_link(watched, worker):
    watched.links.sync({"w": worker.info})
    await until(lambda: watched.up() == {"w"})
    await worker.die()
    worker.info = msgspec.structs.replace(worker.info, incarnation="w-2")
    await worker.start()
    await until(lambda: not watched.up())
    watched.links.sync({"w": worker.info})
    await until(lambda: watched.up() == {"w"})
    assert [k.info.incarnation for k in watched.links] == ["w-2"]


@pytest.mark.parametrize(
    "said", [{"incarnation": "w-2"}, {"address": "127.0.0.1:1"}], ids=["incarnation", "address"]
)
async def test_a_redis_that_says_otherwise_does_not_take_a_link_down_that_is_up(watched, worker, said):
    watched.links.sync({"w": worker.info})
    await until(lambda: watched.up() == {"w"})
    [link] = watched.links
    for _ in range(3):
        watched.links.sync({"w": msgspec.structs.replace(worker.info, **said)})
        await asyncio.sleep(0)
    assert list(watched.links) == [link]
    assert (link.up, link.info, watched.changes) == (True, worker.info, 1)
    await worker.die()
    await until(lambda: not watched.up())
    watched.links.sync({"w": msgspec.structs.replace(worker.info, **said)})
    assert list(watched.links) != [link], "its link is down: now Redis is believed"


async def test_a_worker_that_says_itself_that_it_is_another_incarnation_is_believed(watched, worker, monkeypatch):
    monkeypatch.setattr("baton.router.workers.link.PROBE_EVERY_S", 0.02)
    watched.links.sync({"w": worker.info})
    await until(lambda: watched.up() == {"w"})
    worker.says_incarnation = "w-2"
    await until(lambda: not watched.up())


async def test_a_link_of_the_other_role_is_no_link(watched, worker):
    watched.links.sync({"w": worker.info})
    other = watched.links.prefill if worker.info.role == "decode" else watched.links.decode
    with pytest.raises(WorkerLost):
        other("w")
    with pytest.raises(WorkerLost):
        other("nobody")


async def test_one_session_carries_all_requests_of_a_worker():
    async with cluster() as c:
        streams = [c.open((i, i))[0] for i in range(20)]
        for stream in streams:
            async for _ in stream:
                pass
        assert c.d[0].sessions == 1


async def test_a_typed_error_of_a_call_arrives_whole_and_leaves_the_link_up(watched):
    worker = FakePrefill("w")
    await worker.start()
    worker.failures = [Draining("soon gone", retry_after_s=2.5)]
    watched.links.sync({"w": worker.info})
    await until(lambda: watched.up() == {"w"})
    with pytest.raises(Draining, match="soon gone") as caught:
        await watched.links.prefill("w").prefill(w.PrefillRequest(), 5)
    assert caught.value.retry_after_s == 2.5
    assert watched.up() == {"w"}
    await worker.die()


async def test_a_killed_process_is_known_dead_by_its_connection(watched):
    code = (
        "import asyncio\n"
        "from tests.router.fake_workers import FakeDecode\n"
        "async def main():\n"
        "    worker = FakeDecode('w')\n"
        "    await worker.start()\n"
        "    print(worker.info.address, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    address = (await process.stdout.readline()).decode().strip()
    watched.links.sync({"w": info("w", "decode", address=address)})
    await until(lambda: watched.up() == {"w"}, 30)
    lease = watched.links.decode("w").admit(w.Admit(request_id="r"), lambda _: None, lambda: "retry")
    async with lease:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(lease.ended, 20)
    assert not watched.up()
    await process.wait()


async def test_links_dropped_at_any_moment_end():
    """grpc.aio swallows some cancellations; a link that missed one would reconnect for ever."""
    rng = random.Random(1)
    for _ in range(150):
        links = LinkTable("router", lambda: None, random.Random(1))
        links.sync({"p": info("p", "prefill"), "d": info("d", "decode")})
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(rng.choice((0, 0, 0.0005, 0.002)))
        await asyncio.wait_for(links.close(), 20)


@pytest.mark.parametrize("trouble", [RuntimeError("a mistake of ours"), asyncio.CancelledError()], ids=repr)
async def test_a_link_outlives_whatever_goes_wrong_in_it(watched, worker, monkeypatch, trouble):
    kind = DecodeLink if worker.info.role == "decode" else PrefillLink
    hold, tries = kind._hold, []

    async def stumbles_twice(self):
        tries.append(self)
        if len(tries) <= 2:
            raise trouble
        await hold(self)

    monkeypatch.setattr(kind, "_hold", stumbles_twice)
    watched.links.sync({"w": worker.info})
    await until(lambda: watched.up() == {"w"}, 30)


async def test_a_reply_that_cannot_be_read_is_a_lost_worker_and_the_link_is_made_anew(watched, monkeypatch, caplog):
    read, tries = w.WorkerInfo.FromString, []

    def once(data):
        tries.append(data)
        if len(tries) == 1:
            raise MemoryError  # grpc.aio returns None then
        return read(data)

    stub = stubs.WorkerStub

    def made(channel):
        made = stub(channel)
        made.Describe = channel.unary_unary(
            "/baton.v1.Worker/Describe",
            request_serializer=w.DescribeRequest.SerializeToString,
            response_deserializer=once,
        )
        return made

    monkeypatch.setattr(stubs, "WorkerStub", made)
    worker = FakePrefill("w")
    await worker.start()
    watched.links.sync({"w": worker.info})
    await until(lambda: watched.up() == {"w"}, 30)
    assert len(tries) > 1
    assert said(caplog) == ["prefill w: what w answered can't be read"]
    await worker.die()


async def test_a_link_that_ended_does_not_keep_its_workers_next_incarnation_out(watched, worker, monkeypatch):
    async def ends(self):
        return

    with monkeypatch.context() as patched:
        patched.setattr(WorkerLink, "run", ends)
        watched.links.sync({"w": msgspec.structs.replace(worker.info, incarnation="w-0")})
        await asyncio.sleep(0.05)
    watched.links.sync({"w": worker.info})
    await until(lambda: watched.up() == {"w"}, 30)


async def test_a_worker_that_is_there_and_fails_is_named_in_the_log_once(watched, monkeypatch, caplog):
    async def fails(self, request, context):
        raise ValueError("a mistake of the worker's")

    monkeypatch.setattr(FakePrefill, "Describe", fails)
    worker = FakePrefill("w")
    await worker.start()
    watched.links.sync({"w": worker.info})
    await until(lambda: "a mistake of the worker's" in " ".join(said(caplog)), 30)
    await asyncio.sleep(0.4)
    assert len(said(caplog)) == 1
    assert not watched.up()
    await worker.die()


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "baton.router" and r.levelname == "WARNING"]


# ---- a session by itself -----------------------------------------------------------------------------


def sent(session: DecodeSession) -> list[str]:
    kinds = []
    while not session.outbox.empty():
        kinds.append(session.outbox.get_nowait().WhichOneof("message"))
    return kinds


def lease_on(session: DecodeSession):
    return DecodeLease(session, w.Admit(request_id="r"), lambda _: None, lambda: "retry")


async def entered(session: DecodeSession):
    lease = lease_on(session)
    entering = asyncio.create_task(lease.__aenter__())
    await asyncio.sleep(0)
    session.receive(w.SessionDown(admitted=w.Admitted(request_id="r", lease=b"l", epoch=1)))
    await entering
    return lease


async def test_leaving_a_lease_sends_one_cancel_however_often_it_is_closed():
    session = DecodeSession("w")
    lease = await entered(session)
    lease.close()
    lease.close()
    assert sent(session) == ["admit", "cancel"]
    assert len(session) == 0


async def test_a_finished_lease_sends_no_cancel():
    session = DecodeSession("w")
    lease = await entered(session)
    run = w.RequestTokens(request_id="r")
    run.run.finish_reason = "stop"
    session.receive(w.SessionDown(tokens=w.TokenFrame(outputs=[run])))
    await lease.ended
    lease.close()
    assert sent(session) == ["admit"]


async def test_a_refused_admit_sends_no_cancel_and_a_refused_rearm_keeps_the_lease():
    session = DecodeSession("w")
    refused = w.SessionDown(refused=w.Refused(request_id="r", error=w.WireError(type="PoolExhausted")))
    entering = asyncio.create_task(lease_on(session).__aenter__())
    await asyncio.sleep(0)
    session.receive(refused)
    with pytest.raises(BatonError):
        await entering
    assert sent(session) == ["admit"]
    lease = await entered(session)
    rearming = asyncio.create_task(lease.rearm())
    await asyncio.sleep(0)
    session.receive(refused)
    with pytest.raises(BatonError):
        await rearming
    assert not lease.ended.done()
    lease.close()
    assert sent(session) == ["admit", "rearm", "cancel"]


async def test_a_lease_given_up_before_its_answer_is_cancelled():
    session = DecodeSession("w")
    entering = asyncio.create_task(lease_on(session).__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
    assert sent(session) == ["admit", "cancel"]


async def test_a_lost_session_ends_its_leases_and_takes_no_more():
    session = DecodeSession("w")
    lease = await entered(session)
    session.lose(WorkerLost("gone"))
    with pytest.raises(WorkerLost):
        await lease.ended
    lease.close()
    assert sent(session) == ["admit"]
    with pytest.raises(WorkerLost):
        await lease_on(session).__aenter__()


async def test_a_frame_that_one_request_stumbles_over_costs_the_others_nothing():
    session, taken = DecodeSession("w"), []

    def stumble(output):
        raise KeyError("a mistake of ours")

    leases = [
        DecodeLease(session, w.Admit(request_id=name), sink, lambda: "retry")
        for name, sink in (("bad", stumble), ("good", taken.append))
    ]
    entering = [asyncio.create_task(lease.__aenter__()) for lease in leases]
    await asyncio.sleep(0)
    for lease in leases:
        session.receive(w.SessionDown(admitted=w.Admitted(request_id=lease.request_id, lease=b"l", epoch=1)))
    await asyncio.gather(*entering)
    outputs = [w.RequestTokens(request_id=name) for name in ("bad", "good")]
    session.receive(w.SessionDown(tokens=w.TokenFrame(outputs=outputs)))
    with pytest.raises(BatonError, match="a mistake of ours"):
        await leases[0].ended
    assert [output.request_id for output in taken] == ["good"]
    assert not leases[1].ended.done()
    for lease in leases:
        lease.close()


async def test_messages_about_requests_that_left_are_dropped():
    session = DecodeSession("w")
    session.receive(w.SessionDown(ended=w.Ended(request_id="x")))
    session.receive(w.SessionDown(tokens=w.TokenFrame(outputs=[w.RequestTokens(request_id="x")])))
    session.receive(w.SessionDown(admitted=w.Admitted(request_id="x")))
