"""Channels of the nccl transport over gloo: kept, replaced when out of step; workers that join, die and rejoin."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.kv.memory import block_sums
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import nccl
from baton.kv.wire import frames
from baton.kv.wire.base import HandoffStream
from baton.kv.wire.frames import Block, Frame, Kind
from baton.kv.wire.moving import ChannelBroken, MoveBytes, MoverClient
from baton.protos.errors import WorkerLost
from tests.kv.transport.rigs import MOVER
from tests.kv.transport.test_contract import Peer, answer
from tests.kv.transport.test_handoffs import until

PAGE, PAGES = 64 << 10, 8


@pytest.fixture(scope="module")
def memory() -> PageMemory:
    made = PageMemory.create(PAGES, PAGE)
    made.view()[:] = os.urandom(PAGE * PAGES)
    return made


def blocks(memory: PageMemory, *numbers: int) -> tuple[Frame, list[memoryview]]:
    payload = [memory.page(number) for number in numbers]
    table = tuple(Block(n, bytes(32), block_sums.checksum(p)) for n, p in zip(numbers, payload, strict=True))
    return Frame(Kind.BLOCK, unit=PAGE, blocks=table), payload


class Near:
    """A receiver and a sender on this loop, beside the mover that all tests share."""

    def __init__(self, memory: PageMemory) -> None:
        self.peer, self.memory = Peer(), memory
        server, self.address = nccl.listen("127.0.0.1", self.peer.accept, MOVER.here())
        assert isinstance(server, nccl.NcclServer)
        self.server, self.transport = server, nccl.NcclTransport(memory, MOVER.here())

    @property
    def channels(self) -> set[bytes]:
        return set(self.server._channels)

    async def shipped(self, *numbers: int) -> None:
        stream = await self.transport.connect(self.address)
        await stream.send(*blocks(self.memory, *numbers))
        await answer(stream)
        await stream.close()
        await until(lambda: not self.server.streams, 60)


@pytest.fixture
async def near(memory: PageMemory) -> AsyncIterator[Near]:
    made = Near(memory)
    yield made
    await made.transport.close()
    made.server.close()


async def test_a_stream_takes_the_channel_that_an_earlier_one_left(near: Near) -> None:
    await near.shipped(0, 1)
    first = near.channels
    await near.shipped(2)
    await near.shipped(5, 3)
    assert near.channels == first
    assert near.peer.blocks == [bytes(near.memory.page(n)) for n in (0, 1, 2, 5, 3)]


async def test_streams_at_the_same_time_have_channels_of_their_own(near: Near) -> None:
    await asyncio.gather(*(near.shipped(number) for number in range(3)))
    assert len(near.channels) == 3
    assert sorted(near.peer.blocks) == sorted(bytes(near.memory.page(n)) for n in range(3))


async def test_a_channel_that_lost_a_message_is_replaced_and_no_old_bytes_are_taken_for_new(near: Near) -> None:
    await near.shipped(0)
    [group] = near.channels
    near.server._channels[group].count += 1  # as after a stream that was aborted with a message in flight
    await near.shipped(7)
    assert group not in near.channels
    assert near.peer.blocks == [bytes(near.memory.page(n)) for n in (0, 7)]


async def test_a_stream_that_is_closed_with_bytes_in_flight_leaves_nothing_behind(near: Near) -> None:
    for number in range(4):
        stream = await near.transport.connect(near.address)
        sending = asyncio.ensure_future(stream.send(*blocks(near.memory, *range(PAGES))))
        await asyncio.sleep(0.01 * number)
        await stream.close()
        await asyncio.wait({sending})
    await near.shipped(6)
    assert near.peer.blocks[-1] == bytes(near.memory.page(6))


async def test_a_channel_that_nobody_uses_for_long_is_left(near: Near, monkeypatch: pytest.MonkeyPatch) -> None:
    await near.shipped(0)
    old = near.channels
    monkeypatch.setattr("baton.kv.wire.collective.IDLE_S", -1.0)
    await near.shipped(1)
    assert near.channels.isdisjoint(old)
    assert near.peer.blocks == [bytes(near.memory.page(n)) for n in (0, 1)]


async def test_a_block_that_no_message_has_room_for_is_refused_by_its_size(near: Near) -> None:
    stream = await near.transport.connect(near.address)
    large = Frame(Kind.BLOCK, unit=(8 << 20) + 1, blocks=(Block(0, bytes(32), 1),))
    with pytest.raises(WorkerLost, match="a block of 8388609 bytes doesn't fit messages of 8388608"):
        await stream.send(large, [memoryview(bytes(large.unit))])
    await stream.close()


async def test_an_address_without_a_meeting_point_is_refused_by_name(near: Near) -> None:
    with pytest.raises(WorkerLost, match="host:port/port"):
        await near.transport.connect("127.0.0.1:1")


# ---- processes -------------------------------------------------------------------------------------------


class Far:
    """A receiver in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.kv.transport.far_receiver"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().decode().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def far() -> Iterator[list[Far]]:
    made: list[Far] = []
    yield made
    for receiver in made:
        receiver.kill()


async def acknowledged(stream: HandoffStream, memory: PageMemory, *numbers: int) -> tuple[int, ...]:
    await stream.send(*blocks(memory, *numbers))
    raw = await asyncio.wait_for(stream.receive(), 60)
    assert raw is not None
    return frames.acked_blocks(frames.decode(raw))


async def until_it_breaks(stream: HandoffStream, memory: PageMemory) -> None:
    while True:
        await acknowledged(stream, memory, 3)


@pytest.mark.thorough  # its parts by themselves are below, and by every transport in test_kills.py
async def test_workers_join_die_and_rejoin(memory: PageMemory, far: list[Far]) -> None:
    transport = nccl.NcclTransport(memory, MOVER.here())
    for _ in range(2):
        far += [await asyncio.to_thread(Far)]
        stream = await transport.connect(far[-1].address)
        assert await acknowledged(stream, memory, 1, 2) == (1, 2)
        far[-1].kill()
        began = time.monotonic()
        with pytest.raises(WorkerLost):
            await until_it_breaks(stream, memory)
        assert time.monotonic() - began < 30
        await stream.close()
        with pytest.raises(WorkerLost):
            await transport.connect(far[-1].address)
    far += [await asyncio.to_thread(Far)]
    stream = await transport.connect(far[-1].address)
    assert await acknowledged(stream, memory, 4) == (4,)
    await transport.close()


@pytest.mark.thorough  # tests/kv/transport/test_kills.py kills senders and receivers
async def test_a_mover_that_is_killed_breaks_its_streams_and_is_started_anew(
    memory: PageMemory, far: list[Far]
) -> None:
    far += [await asyncio.to_thread(Far)]
    transport = nccl.NcclTransport(memory)
    stream = await transport.connect(far[0].address)
    assert await acknowledged(stream, memory, 5, 0) == (5, 0)
    told = Path(f"/proc/{transport._mover.pid}/environ").read_bytes().split(b"\0")
    assert b"CUDA_DEVICE_MAX_CONNECTIONS=32" in told  # each channel's kernels wait in a queue of their own
    os.kill(transport._mover.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(stream.receive(), 60)
    await stream.close()
    stream = await transport.connect(far[0].address)
    assert await acknowledged(stream, memory, 6) == (6,)
    await transport.close()


async def test_a_mover_that_dies_with_words_unread_breaks_its_channels_without_a_fault() -> None:
    client, (ours, theirs) = MoverClient(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said, faults = list[object](), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    client._sock, client._listeners["a"] = ours, said.append
    client._watch()
    client.move(MoveBytes("a", 0, 0, 1))
    theirs.close()
    await until(lambda: bool(said))
    assert said == [ChannelBroken("a", "the mover process died")]
    assert not faults


def test_a_mover_whose_worker_dies_with_words_unread_ends_in_silence() -> None:
    from baton.engine.mover import Mover  # loads torch

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(b"unread")
    theirs.close()
    Mover(ours).run()
    ours.close()
