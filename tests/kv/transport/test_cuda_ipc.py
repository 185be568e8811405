"""Tests what cuda_ipc adds to the contract: refusals by name, the ring's room, and nothing of the card left
behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.memory import block_sums, cuda_driver
from baton.kv.memory.cuda_driver import Driver
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import cuda_ipc
from baton.kv.transport import sender as transport_named
from baton.kv.transport.cuda_ipc import CudaIpcTransport, Ring
from baton.kv.wire import frames
from baton.kv.wire.base import ReplyStream
from baton.kv.wire.frames import Block, Frame, Kind
from baton.protos.errors import BatonError, ConfigError, WorkerLost
from tests.kv.transport.rigs import required_driver, stand_in_driver
from tests.kv.transport.test_handoffs import until


def known() -> int:
    """Pieces of the card's memory that this process has."""
    return int(ctypes.CDLL(stand_in_driver()).stand_in_known())


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cuda_driver, "LIBRARY", required_driver())
    return cuda_driver.driver().card


def test_without_a_driver_both_ends_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-is-not-here.so.1")
    text = "cuda_ipc needs an NVIDIA driver on this host.*set it to auto"
    with pytest.raises(ConfigError, match=text):
        transport_named("cuda_ipc", PageMemory.create(1, 4096))
    with pytest.raises(ConfigError, match=text):
        cuda_ipc.listen(str(tmp_path / "gpu"), lambda line: pytest.fail("nobody may come"))
    assert not (tmp_path / "gpu").exists()


def test_a_driver_without_a_card_says_so_in_its_own_words() -> None:
    code = f"from baton.kv.memory.cuda_driver import Driver; Driver({required_driver()!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"STAND_IN_NO_CARD": "1"}, capture_output=True, text=True, check=False,
        cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    assert "cuInit: no CUDA-capable device is detected (100)" in done.stderr


async def test_a_receiver_on_another_card_is_refused_before_connecting(card: str) -> None:
    transport = CudaIpcTransport()
    with pytest.raises(WorkerLost, match=r"both workers on one card: ours is 0707.*the receiver's 0808"):
        await transport.connect("/nowhere#0808")
    assert known() == 0


class Sink:
    """Takes every block; ``slow`` ones only when told."""

    def __init__(self, line: ReplyStream, got: list[bytes]) -> None:
        self._line, self._got = line, got

    def take(self, frame: Frame) -> None:
        self._line.reply(frames.ack(frame))

    def place(self, frame: Frame) -> list[memoryview]:
        self._places = [memoryview(bytearray(frame.unit)) for _ in frame.blocks]
        return self._places

    def landed(self, frame: Frame, checksums: list[int], resident: bool = False) -> None:
        frames.check_blocks(frame, checksums)
        self._got += [bytes(place) for place in self._places]

    def over(self, error: BatonError | None) -> None:
        self._line.end()


async def test_many_times_the_rings_size_goes_through_it_and_nothing_is_left(card: str, tmp_path: Path) -> None:
    got: list[bytes] = []
    server, address = cuda_ipc.listen(str(tmp_path / "gpu"), lambda line: Sink(line, got))
    transport = CudaIpcTransport(ring_bytes=10_000)
    stream = await transport.connect(address)
    rng, sent = random.Random(1), list[bytes]()

    async def send() -> None:
        for number in range(60):
            size = rng.choice([300, 999, 2500])
            payload = [rng.randbytes(size) for _ in range(rng.randint(1, 3))]
            table = tuple(Block(number, bytes(32), block_sums.checksum(data)) for data in payload)
            await stream.send(Frame(Kind.PROBE, unit=size, blocks=table), [memoryview(data) for data in payload])
            sent.extend(payload)
        await stream.send(Frame(Kind.COMMIT))

    sending = asyncio.ensure_future(send())
    raw = await asyncio.wait_for(stream.receive(), 30)
    assert raw is not None
    assert frames.decode(raw).subject == Kind.COMMIT
    await sending
    assert got == sent
    with pytest.raises(WorkerLost, match="doesn't fit a ring of 10000"):
        await stream.send(Frame(Kind.PROBE, unit=10_001), [memoryview(bytes(10_001))])
    await stream.close()
    await transport.close()
    server.close()
    await until(lambda: known() == 0)


async def test_whoever_waits_for_room_hears_that_the_stream_was_closed(card: str, tmp_path: Path) -> None:
    server, address = cuda_ipc.listen(str(tmp_path / "gpu"), lambda line: Sink(line, []))
    transport = CudaIpcTransport(ring_bytes=1000)
    stream = await transport.connect(address)
    frame = Frame(Kind.PROBE, unit=900, blocks=(Block(0, bytes(32), block_sums.checksum(bytes(900))),))
    await stream.send(frame, [memoryview(bytes(900))])
    stream._given_back = lambda: None  # the receiver is slow
    waiting = asyncio.ensure_future(stream.send(frame, [memoryview(bytes(900))]))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await stream.close()
    with pytest.raises(WorkerLost, match="it is over"):
        await waiting
    await transport.close()
    server.close()


class NoCard(Driver):
    """Stands for a card that has addresses only."""

    def __init__(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        return 0

    def share(self, address: int) -> bytes:
        return b""


@given(st.lists(st.one_of(st.integers(1, 60), st.none()), max_size=80))
def test_what_is_taken_of_a_ring_never_overlaps_and_all_of_it_can_be_had(steps: list[int | None]) -> None:
    ring, model = Ring(NoCard(), 100), deque[tuple[int, int]]()
    for size in steps:
        if size is None:
            if model:
                assert ring.taken.popleft() == model.popleft()
        elif (begin := ring.take(size)) is not None:
            assert 0 <= begin <= 100 - size
            assert all(begin + size <= low or high <= begin for low, high in model)
            model.append((begin, begin + size))
        else:
            assert model, "an empty ring has room for anything that fits"
    assert ring.taken == model
