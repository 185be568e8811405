"""SIGKILL to a real process at either end of a handoff, at any moment: the other hears it and leaks nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.bench.kv import setting
from baton.kv.transport import sender as transport_named
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.protos.channel import ReceiveClosed, ShipBlock
from baton.protos.errors import WorkerLost
from tests.kv.transport.rigs import grpc_rig, shm_rig, tcp_rig
from tests.kv.transport.test_handoffs import BLOCKS, Pair, until
from tests.thorough import later

PAGE, PAGES = 256 << 10, 64
SENDING = """
import asyncio, sys
from tests.kv.transport.test_handoffs import BLOCKS, Pair
from tests.kv.transport.rigs import Rig
from baton.kv.transport import sender
async def main(name, address):
    pair = Pair()
    pair.epoch = 1
    pair.rig = Rig(sender(name, pair.source), address, None)
    handoff = pair.handoff()
    running = asyncio.ensure_future(handoff.run())
    print("ready", flush=True)
    for index in range(BLOCKS):
        handoff.ship(pair.ship(index))
        await asyncio.sleep(0.004)
    await running
asyncio.run(main(*sys.argv[1:]))
"""
RIGS = {"grpc": grpc_rig, "tcp": tcp_rig, "shm": shm_rig}
MANY = pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(900)])


class Receiver:
    """Runs a receiving process."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="bk-")  # a killed process leaves its own behind
        self.process = subprocess.Popen(
            [sys.executable, "-m", "baton.bench.kv.receiver", str(PAGE), str(PAGES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": self._scratch.name},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.addresses = json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._scratch.cleanup()


@pytest.fixture
def receivers() -> Iterator[list[Receiver]]:
    made: list[Receiver] = []
    yield made
    for receiver in made:
        receiver.end()


@pytest.mark.parametrize("runs", [2, MANY])
@pytest.mark.parametrize("name", ["tcp", *map(later, ("grpc", "shm"))])
async def test_a_sender_hears_at_once_that_its_receiver_was_killed(
    name: str, runs: int, receivers: list[Receiver]
) -> None:
    rng, memory = random.Random(name), setting.source(PAGE, PAGES)
    transport = transport_named(name, memory)
    for _ in range(runs):
        receivers.append(Receiver())
        there = receivers[-1]
        sender = Sender("p", "m", setting.FINGERPRINT, setting.layout(PAGE))
        to = Destination(there.addresses[name], setting.lease(PAGES), 1, "r", PAGES, 16)
        handoff = Handoff(transport, memory, sender, to, time.monotonic)
        running = asyncio.ensure_future(handoff.run())
        await ship_slowly(handoff, rng.randrange(PAGES))
        os.kill(there.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(running, 20)
        there.end()
    await transport.close()


async def ship_slowly(handoff: Handoff, count: int) -> None:
    hashes = setting.hashes(PAGES)
    for index in range(count):
        handoff.ship([ShipBlock(index, index, hashes[index], 16)])
        await asyncio.sleep(0.0005)


@pytest.fixture(params=["shm", *map(later, ("grpc", "tcp"))])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[str, Pair]]:
    made = Pair()
    made.rig = await RIGS[request.param](made.intake.accept, made.source, tmp_path)
    yield request.param, made
    await made.rig.transport.close()
    await made.rig.stop()


@pytest.mark.parametrize("runs", [2, MANY])
async def test_a_receiver_lets_go_of_its_pages_when_its_sender_was_killed(
    pair: tuple[str, Pair], runs: int
) -> None:
    (name, there), rng = pair, random.Random(7)
    for _ in range(runs):
        there.admit()
        there.told.clear()
        wanted = there.intake.received_blocks + rng.randrange(BLOCKS)
        command = [sys.executable, "-c", SENDING, name, there.rig.address]
        child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        await child.stdout.readline()
        await until(lambda wanted=wanted: there.intake.received_blocks >= wanted and bool(there.told), 60)
        child.kill()
        await child.wait()
        await until(lambda: there.told[-1] == ReceiveClosed(1, 1))
        there.intake.rearm(1, 2)
        there.epoch = 2
        await there.whole()
        await there.end()
