"""A worker's I/O process that goes from role to role: how long it waits, what it keeps, and where it goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from baton.cluster.membership import PolledRoster, WorkerEntry, connect
from baton.cluster.roles import RoleWishes
from baton.launch.redis_server import RedisServer
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.worker import host
from baton.worker.control import RoleSwitch
from baton.worker.host import WorkerHost
from baton.worker.slots import WorkerSlot
from tests.worker.host_rig import Host
from tests.worker.test_role_change import Service, control, ready, spec


def found(roster: PolledRoster) -> list[WorkerEntry]:
    return list(roster.snapshot().values())


@pytest.mark.parametrize(("speculation", "ended"), [("auto", True), ("auto+draft:x", False)])
async def test_a_change_of_role_that_loads_a_model_may_take_its_time(
    monkeypatch: pytest.MonkeyPatch, speculation: str, ended: bool
) -> None:
    monkeypatch.setattr(host, "CHANGE_S", 0.0)
    killed, sent = asyncio.Event(), asyncio.Event()
    control = SimpleNamespace(
        next_role_change=lambda: ready(RoleSwitch("decode", 0.0, "i")), leave_role=lambda change: ready(None)
    )
    channel = SimpleNamespace(send=lambda message: sent.set())
    engine: Any = SimpleNamespace(channel=channel, process=SimpleNamespace(kill=killed.set))
    worker: Any = SimpleNamespace(control=control)
    changes = WorkerHost(spec("prefill", speculation=speculation), WorkerSlot(Path("x"), "s"))
    changing = asyncio.ensure_future(changes._change(worker, engine, SimpleNamespace()))  # type: ignore[arg-type]
    await asyncio.wait_for(sent.wait(), 60)
    for _ in range(10):
        await asyncio.sleep(0)
    assert killed.is_set() == ended
    changing.cancel()


async def test_a_worker_that_is_drained_while_it_changes_its_role_drains_on_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, states = list[object](), list[str]()

    def runtime(*arguments: object) -> SimpleNamespace:
        ctl = control(Service(0), sent)
        return SimpleNamespace(
            control=ctl, listen=asyncio.Event().wait, health=None, next_role="prefill", role_error=None
        )

    async def serve(own: object, worker: Any, stack: object) -> SimpleNamespace:
        states.append(worker.control.info.state)
        return SimpleNamespace(stop=lambda grace_s: ready(None))

    async def until_over(worker: Any, *arguments: object) -> None:
        if len(states) == 1:
            await worker.control.set_role("prefill", 0.0)
            await worker.control.drain(0.0)

    monkeypatch.setattr(host, "RoleRuntime", runtime)
    monkeypatch.setattr(host, "serve_grpc", serve)
    monkeypatch.setattr(host, "join", lambda *arguments: ready(None))
    monkeypatch.setattr(host, "beat", lambda *arguments: ready(None))
    monkeypatch.setattr(host, "end_within", lambda limit_s: None)
    worker = WorkerHost(spec("prefill"), WorkerSlot(Path("x"), "s"))
    for name, made in {"_info": lambda *said: None, "_say": lambda **said: None, "_until_over": until_over}.items():
        monkeypatch.setattr(worker, name, made)
    core = SimpleNamespace(begin=lambda info: None, changed=lambda *said: None, drains=False, refusal=None)
    core.blocks = core.keys = core.environment = core.held = None
    for _ in range(3):
        assert await worker._play(SimpleNamespace(ready=None), core) is None  # type: ignore[arg-type]
    assert states == ["ready", "draining", "draining"]
    assert [type(message).__name__ for message in sent] == ["Drain"] * 3


async def test_a_host_whose_next_role_cannot_begin_serves_its_own_again_and_is_wanted_in_it(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis").start()
    redis = connect(server.url)
    host = Host(tmp_path, "prefill", speculation="draft:nowhere", redis_url=server.url, beat_s=0.05)
    try:
        before = await asyncio.to_thread(host.record)
        async with grpc.aio.insecure_channel(before.address) as channel:
            reply = await stubs.WorkerStub(channel).SetRole(w.SetRoleRequest(role="decode"))
        async with asyncio.timeout(60), PolledRoster(redis, "baton", poll_s=0.05) as roster:
            lives = {before.incarnation, reply.incarnation}
            while not any(e.info.state == "ready" and e.info.incarnation not in lives for e in found(roster)):
                await asyncio.sleep(0.01)
            [now] = [e.info for e in found(roster) if e.info.incarnation not in lives]
            assert now.role_error is not None
            assert "speculation draft:nowhere: a paced engine" in now.role_error.message
            while await RoleWishes(redis, "baton").of("prefill-0") != "prefill":
                await asyncio.sleep(0.01)
        now = await asyncio.to_thread(host.record)
        assert (now.role, now.engine_pid) == ("prefill", before.engine_pid)
        log = (tmp_path / "prefill-0.log").read_text()
        assert "prefill-0 stays a prefill worker: speculation draft:nowhere: a paced engine" in log
    finally:
        await redis.aclose()
        assert host.end() == 0
        server.stop()


async def test_a_host_plays_one_role_after_the_other_around_one_engine(tmp_path: Path) -> None:
    host = Host(tmp_path, "prefill")
    try:
        before = await asyncio.to_thread(host.record)
        for role in ("decode", "prefill"):
            now = await asyncio.to_thread(host.record)
            async with grpc.aio.insecure_channel(now.address) as channel:
                stub = stubs.WorkerStub(channel)
                reply = await stub.SetRole(w.SetRoleRequest(role=role, grace_seconds=0.2))
            for _ in range(3000):
                now = await asyncio.to_thread(host.record)
                if now.incarnation == reply.incarnation and now.role == role and now.address:
                    break
                await asyncio.sleep(0.02)
            async with grpc.aio.insecure_channel(now.address) as channel:
                info = await stubs.WorkerStub(channel).Describe(w.DescribeRequest())
            assert (info.role, info.incarnation, info.state) == (role, reply.incarnation, "ready")
            assert now.engine_pid == before.engine_pid
            assert info.metrics_address == before.metrics_address
    finally:
        assert host.end() == 0
