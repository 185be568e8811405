"""An engine that is asked whether it gets on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.worker.engine_watch import EngineWatch
from baton.worker.host import EXIT_ENGINE_LOST
from tests.worker.host_rig import PROFILE, Host

LIMIT_S = 1.5


class AnsweringEngine:
    """An engine that answers while ``answers`` is set, and what was told of it."""

    def __init__(self) -> None:
        self.answers, self.told = asyncio.Event(), list[bool]()
        self.count = 0

    async def ask(self) -> None:
        self.count += 1
        await self.answers.wait()

    async def tell(self, stalls: bool) -> None:
        self.told.append(stalls)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.005)


async def test_one_that_answers_is_asked_again_and_nothing_is_told() -> None:
    engine = AnsweringEngine()
    engine.answers.set()
    watching = asyncio.create_task(EngineWatch(engine.ask, engine.tell, 0.05).run())
    await until(lambda: engine.count > 3)
    watching.cancel()
    assert engine.told == []


async def test_one_that_answers_late_is_back() -> None:
    engine = AnsweringEngine()
    watching = asyncio.create_task(EngineWatch(engine.ask, engine.tell, 0.5).run())
    await until(lambda: engine.told == [True])
    engine.answers.set()
    await until(lambda: engine.told == [True, False])
    watching.cancel()


async def test_one_that_never_answers_is_given_up() -> None:
    engine = AnsweringEngine()
    await asyncio.wait_for(EngineWatch(engine.ask, engine.tell, 0.1).run(), 20)
    assert engine.told == [True]


async def test_one_that_answers_others_is_not_asked_until_it_is_silent_for_a_pause() -> None:
    engine, silent = AnsweringEngine(), [0.0]
    engine.answers.set()
    watching = asyncio.create_task(EngineWatch(engine.ask, engine.tell, 0.05, lambda: silent[0]).run())
    await until(lambda: engine.count == 1)
    await asyncio.sleep(0.1)  # ten pauses
    assert engine.count == 1
    silent[0] = 1.0
    await until(lambda: engine.count > 3)
    watching.cancel()
    assert engine.told == []


async def test_without_a_limit_nobody_is_asked() -> None:
    engine = AnsweringEngine()
    watching = asyncio.create_task(EngineWatch(engine.ask, engine.tell, 0.0).run())
    for _ in range(10):
        await asyncio.sleep(0)
    watching.cancel()
    assert engine.count == 0


def stop(host: Host) -> None:
    os.kill(host.record().engine_pid, signal.SIGSTOP)


def hang(host: Host) -> None:
    """A prompt whose step takes minutes."""
    with grpc.insecure_channel(host.record().address) as channel:
        prompt = w.PrefillRequest(
            token_ids=[1, 2, 3], prompt_tokens=3, decode_address="127.0.0.1:9", lease=b"x", epoch=1
        )
        with pytest.raises(grpc.RpcError):
            stubs.PrefillWorkerStub(channel).Prefill(prompt, timeout=0.3)


@pytest.mark.parametrize("sticks", [stop, pytest.param(hang, marks=pytest.mark.thorough)])
def test_a_stuck_engine_stops_serving_and_its_host_leaves_its_slot_to_a_successor(
    tmp_path: Path, sticks: Callable[[Host], None]
) -> None:
    slow = tmp_path / "hangs.toml"
    slow.write_text(PROFILE.replace("fixed = 0.001", "fixed = 300.0"))
    host = Host(tmp_path, "prefill", stall_s=LIMIT_S, device=f"paced:{slow}")
    with grpc.insecure_channel(host.record().address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest(service="baton.v1.PrefillWorker")
        assert health.Check(ask, timeout=30).status == health_pb2.HealthCheckResponse.SERVING
        sticks(host)
        news = health.Watch(ask, timeout=60)
        assert next(n for n in news if n.status == health_pb2.HealthCheckResponse.NOT_SERVING)
    assert host.process.wait(60) == EXIT_ENGINE_LOST
    assert host.slot.acquire()
