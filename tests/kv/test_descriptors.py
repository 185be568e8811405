"""Whatever opens descriptors closes them: many lives of each part leave as many open as before.

The first few lives may leave what a process has once (gRPC's poller, a helper's library): they are not counted.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from baton.kv.memory.host_pages import PageMemory
from baton.kv.tiers.disk import DiskTier
from baton.kv.tiers.memory import host_slab
from baton.kv.tiers.stack import Tier, Tiers
from baton.kv.transport.auto import AutoTransport
from baton.protos.errors import ConfigError, WorkerLost
from baton.protos.nouns import WorkerInfo
from baton.worker.channel import EngineChannel, IoChannel
from tests.kv.sharers import LAYOUT, PAGE
from tests.kv.transport.rigs import RIGS
from tests.kv.transport.test_contract import Peer, Rigged, answer

pytestmark = pytest.mark.usefixtures("settled_heap")  # ``opened`` collects garbage, of what these tests leave alone
LIVES = 4
SLOW = {"nccl": 2}  # each life makes a process group
ROUNDS = 2  # the last has to leave nothing, the first only nearly: gRPC's threads may open something for good once
CLOSES_LATER_S = 30.0  # gRPC's own threads close its sockets


def opened() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def lives(live: Callable[[int], Awaitable[None]], count: int = LIVES) -> None:
    """``live`` so often leaves no descriptor, in the second round if not in the first."""
    numbers = itertools.count()
    await live(next(numbers))
    for _ in range(ROUNDS):
        before = opened()
        for _ in range(count):
            await live(next(numbers))
        deadline = time.monotonic() + CLOSES_LATER_S
        while opened() > before and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if opened() <= before:
            return
    raise AssertionError([os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[-60:-1]])


@pytest.mark.parametrize("name", RIGS)
async def test_a_transport_and_its_receiver_close_all_of_theirs(name: str, tmp_path: Path) -> None:
    async def live(number: int) -> None:
        memory, peer = PageMemory.create(4, PAGE), Peer()
        folder = tmp_path / str(number)
        folder.mkdir()
        made = await RIGS[name](peer.accept, memory, folder)
        rig = Rigged(made.transport, made.address, peer, made.stop, memory)
        used, left = await rig.connect(), await rig.connect()
        for stream in (used, left):
            await stream.send(*rig.pages(0, unit=256))
            await answer(stream)
        await used.close()  # ``left`` is for its transport to close
        await made.transport.close()
        await made.stop()
        memory.close()

    await lives(live, SLOW.get(name, LIVES))


async def test_auto_closes_what_it_tried(tmp_path: Path) -> None:
    async def live(number: int) -> None:
        memory, peer = PageMemory.create(4, PAGE), Peer()
        folder = tmp_path / str(number)
        folder.mkdir()
        made = {name: await RIGS[name](peer.accept, memory, folder) for name in ("grpc", "tcp", "shm")}
        ways = {name: made[name].address for name in ("tcp", "shm")}

        async def describe(address: str) -> WorkerInfo:
            return WorkerInfo(
                "d", "i", "decode", address, "m", "f", LAYOUT, 1, 2, (), 4, host_id="here", data_addresses=ways
            )

        auto = AutoTransport(memory, time.perf_counter, describe=describe, host_id="here")
        with pytest.raises(WorkerLost, match="no way to ship KV"):  # Peer answers no probe rightly
            await auto.connect(made["grpc"].address)
        await auto.close()
        for rig in made.values():
            await rig.transport.close()
            await rig.stop()
        memory.close()

    await lives(live, 10)


async def test_a_failed_connection_leaves_none(tmp_path: Path) -> None:
    memory = PageMemory.create(4, PAGE)

    async def live(number: int) -> None:
        for name in ("tcp", "shm"):
            made = await RIGS[name](Peer().accept, memory, tmp_path)
            await made.stop()
            with pytest.raises(WorkerLost):
                await made.transport.connect(made.address)
            await made.transport.close()

    await lives(live)
    memory.close()


async def test_pages_close_theirs_with_close_and_without() -> None:
    async def live(number: int) -> None:
        memory = PageMemory.create(2, PAGE)
        other = PageMemory.attach(os.dup(memory.fd), 2, PAGE)
        other.page(1)[:4] = b"here"
        if number % 2:
            memory.close()
            other.close()

    await lives(live)


async def test_tiers_close_theirs(tmp_path: Path) -> None:
    async def live(number: int) -> None:
        disk, host = DiskTier(tmp_path / "disk", 1 << 16, LAYOUT, "f"), host_slab(1 << 16, LAYOUT.page_bytes)
        assert host is not None
        tiers = Tiers([Tier("host", host), Tier("disk", disk.slab)])
        await tiers.store([bytes([number]) * 32], [memoryview(bytes(LAYOUT.page_bytes))])
        with pytest.raises(ConfigError):
            DiskTier(tmp_path / "disk", 1 << 16, LAYOUT, "f")  # locked
        tiers.close()
        disk.close()

    await lives(live)


async def test_the_local_channel_closes_both_ends() -> None:
    async def live(number: int) -> None:
        engine, io = socket.socketpair()
        ours, theirs = EngineChannel(engine), await IoChannel.open(io)
        memory = PageMemory.create(1, PAGE)
        ours.send_fd(memory.fd)
        got = await theirs.receive_fd()
        assert got is not None
        os.close(got)
        for end in (theirs, ours, memory):
            end.close()

    await lives(live)
