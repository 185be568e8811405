"""Handoffs on a card that end early, by the receiver or by the card: nothing is written from then on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.kv.memory.cuda_driver import Driver
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import cuda_ipc
from baton.kv.transport.cuda_ipc import CudaIpcTransport
from baton.kv.wire.frames import NO_HASH, Block, Frame, Kind
from baton.kv.wire.ring import Ring
from baton.kv.wire.ring_fetch import IpcIncomingStream, Scratch
from baton.protos.channel import BlocksReceived, ReceiveClosed
from baton.protos.errors import ConfigError, WorkerLost
from tests.kv.transport.cards import Cards, LateCopies, known
from tests.kv.transport.test_card_to_card import card, pair
from tests.kv.transport.test_handoffs import BLOCKS, LAYOUT, error_of, until

__all__ = ["card", "pair"]


async def aborted(pair: Cards, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """The lease ends while the card still copies; its page is another's at once. What lies there, card and host."""
    late = LateCopies(pair.theirs._cuda, monkeypatch)
    transport = CudaIpcTransport()  # whose blocks come from the host: the receiver alone launches
    stream = await transport.connect(pair.rig.address)
    await stream.send(pair.opening())
    await stream.send(*pair.frame(0))
    await until(lambda: bool(late.launched))
    page = pair.lease.pages[0]
    pair.intake.close(1)
    assert any(isinstance(said, ReceiveClosed) for said in pair.told)
    pair.theirs.write(page, b"N" * LAYOUT.page_bytes)  # of the page's next owner
    pair.memory.page(page)[:] = b"N" * LAYOUT.page_bytes
    late.let()
    await until(lambda: late.ran == late.waited == 1)
    await error_of(stream)
    await transport.close()
    await asyncio.sleep(0.02)
    assert not any(isinstance(said, BlocksReceived) for said in pair.told)
    return pair.theirs.page(page), bytes(pair.memory.page(page))


async def test_a_stream_that_was_ended_writes_nothing_after(pair: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await aborted(pair, monkeypatch) == (b"N" * LAYOUT.page_bytes,) * 2
    await pair.end()


async def test_the_planted_bug_that_does_not_wait_for_the_card_is_caught(
    pair: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = IpcIncomingStream.settle
    monkeypatch.setattr(IpcIncomingStream, "settle", lambda incoming: None)
    on_card, on_host = await aborted(pair, monkeypatch)
    assert b"N" * LAYOUT.page_bytes not in (on_card, on_host)
    monkeypatch.setattr(IpcIncomingStream, "settle", settle)
    await pair.end()


@pytest.mark.parametrize("when", ["at the launch", "later"])
async def test_a_card_that_fails_breaks_the_stream_and_the_log_says_why(
    pair: Cards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """The sender then measures its ways anew, and finds another."""

    def broken(event: int) -> None:
        raise ConfigError("worker.kv_transport cuda_ipc: cuEventSynchronize: an illegal address (700)")

    if when == "later":
        monkeypatch.setattr(pair.theirs._cuda, "wait_for", broken)
    else:
        monkeypatch.setattr(pair.theirs.pages.copier, "_copy", lambda *arguments: 700)
    transport = CudaIpcTransport()
    stream = await transport.connect(pair.rig.address)
    await stream.send(pair.opening())
    await stream.send(*pair.frame(0))
    await stream.receive()  # to OPEN
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(stream.receive(), 30)
    assert "a handoff from the card's ring broke:" in caplog.text
    assert "an illegal address" in caplog.text
    assert not any(isinstance(said, BlocksReceived) for said in pair.told)
    await transport.close()
    await pair.end()


async def test_a_card_that_answers_nothing_any_more_breaks_the_stream_all_the_same(
    pair: Cards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two frames are on their way: the stream is over although waiting for the second fails, too."""
    late, call, faults = LateCopies(pair.theirs._cuda, monkeypatch), Driver._call, list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))

    def broken(cuda: Driver, name: str, *arguments: object) -> None:
        if "Synchronize" in name:
            raise ConfigError(f"worker.kv_transport cuda_ipc: {name}: an illegal address (700)")
        call(cuda, name, *arguments)

    transport = CudaIpcTransport()
    stream = await transport.connect(pair.rig.address)
    await stream.send(pair.opening())
    await stream.send(*pair.frame(0))
    await stream.send(*pair.frame(1))
    await until(lambda: len(late.launched) == 2)
    monkeypatch.setattr(Driver, "_call", broken)
    late.let()
    await stream.receive()  # to OPEN
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(stream.receive(), 30)
    assert "cuStreamSynchronize: an illegal address" in caplog.text
    assert any(isinstance(said, ReceiveClosed) for said in pair.told)
    assert not faults
    monkeypatch.setattr(Driver, "_call", call)
    await transport.close()
    await pair.end()


async def test_a_server_closes_although_its_card_takes_nothing_back(
    pair: Cards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    server, address = cuda_ipc.listen(str(tmp_path / "another"), pair.intake.accept)
    transport, call = CudaIpcTransport(), Driver._call
    for _ in range(2):
        await transport.connect(address)
    await until(lambda: len(server.streams) == 2)
    rings = [incoming._ring for incoming in server.streams.values() if isinstance(incoming, IpcIncomingStream)]

    def broken(cuda: Driver, name: str, *arguments: object) -> None:
        raise ConfigError(f"worker.kv_transport cuda_ipc: {name}: an illegal address (700)")

    monkeypatch.setattr(Driver, "_call", broken)
    server.close()
    assert not server.streams
    assert caplog.text.count("cuIpcCloseMemHandle: an illegal address") == 2
    monkeypatch.setattr(Driver, "_call", call)
    for ring in rings:
        pair.theirs._cuda.close(ring)
    await transport.close()
    await pair.end()


async def test_what_was_launched_is_waited_for_where_bringing_it_home_fails(
    pair: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateCopies(pair.theirs._cuda, monkeypatch)
    late.let()

    def broken(*arguments: int) -> None:
        raise ConfigError("worker.kv_transport cuda_ipc: cuMemcpyDtoHAsync_v2: an illegal address (700)")

    monkeypatch.setattr(pair.theirs._cuda, "bring", broken)
    transport = CudaIpcTransport()
    stream = await transport.connect(pair.rig.address)
    await stream.send(pair.opening())
    await stream.send(*pair.frame(0))
    await until(lambda: any(isinstance(said, ReceiveClosed) for said in pair.told))
    assert (late.ran, late.launched) == (1, [])
    await transport.close()
    await pair.end()


@pytest.mark.parametrize("when", ["at the launch", "later", "at an upload"])
async def test_a_sender_whose_card_fails_has_lost_its_stream(
    pair: Cards, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def broken(event: int) -> None:
        raise ConfigError("worker.kv_transport cuda_ipc: cuEventSynchronize: an illegal address (700)")

    if when == "later":
        monkeypatch.setattr(pair.ours._cuda, "wait_for", broken)
    elif when == "at an upload":
        pair.resident = set()
        monkeypatch.setattr(pair.ours._cuda, "upload", lambda *arguments: broken(0))
    else:
        monkeypatch.setattr(pair.ours.pages.copier, "_copy", lambda *arguments: 700)
    monkeypatch.setattr("baton.prefill_worker.io.handoff.LAST_WORDS_S", 0.0)
    handoff = pair.handoff()
    handoff.ship(pair.ship(*range(BLOCKS)))
    with pytest.raises(WorkerLost, match="an illegal address"):
        await asyncio.wait_for(handoff.run(), 30)
    await pair.end()


async def test_probes_memory_that_is_gone_is_not_given_back_twice(
    pair: Cards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport = CudaIpcTransport()
    stream = await transport.connect(pair.rig.address)

    def probe(size: int) -> tuple[Frame, list[memoryview]]:
        return Frame(Kind.PROBE, unit=size, blocks=(Block(0, NO_HASH),)), [memoryview(bytes(size))]

    await stream.send(*probe(4096))
    await asyncio.wait_for(stream.receive(), 30)

    def full(size: int) -> int:
        raise ConfigError("worker.kv_transport cuda_ipc: cuMemAlloc_v2: out of memory (2)")

    monkeypatch.setattr(pair.theirs._cuda, "allocate", full)
    await stream.send(*probe(8192))
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(stream.receive(), 30)
    assert "cuMemAlloc_v2: out of memory" in caplog.text
    assert "cuMemFree" not in caplog.text
    await transport.close()
    await pair.end()


async def test_a_close_that_is_cancelled_leaves_its_ring_all_the_same(pair: Cards) -> None:
    transport = CudaIpcTransport(pages=pair.source.device)
    stream = await transport.connect(pair.rig.address)
    closing = asyncio.ensure_future(stream.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    assert len(transport._idle) == 1
    await transport.close()
    await pair.end()


async def test_a_ring_that_is_left_after_its_transport_closed_is_given_back(pair: Cards) -> None:
    transport = CudaIpcTransport()
    before = known()
    closing = asyncio.ensure_future((await transport.connect(pair.rig.address)).close())
    await asyncio.sleep(0)
    await transport.close()
    await closing
    await until(lambda: known() == before)
    await pair.end()


async def test_a_send_after_the_end_takes_no_room_in_a_ring_that_may_be_anothers(pair: Cards) -> None:
    transport = CudaIpcTransport()
    stream = await transport.connect(pair.rig.address)
    await stream.close()
    with pytest.raises(WorkerLost, match="it is over"):
        await stream.send(*pair.frame(0))
    assert not transport._idle[0].taken
    await transport.close()
    await pair.end()


@pytest.mark.parametrize(("made", "fails"), [(Ring, "share"), (Scratch, "pinned")])
def test_what_a_card_gave_by_half_is_given_back(
    card: Driver, monkeypatch: pytest.MonkeyPatch, made: Callable[[Driver, int], object], fails: str
) -> None:
    def full(*arguments: object) -> None:
        raise ConfigError("worker.kv_transport cuda_ipc: out of memory (2)")

    monkeypatch.setattr(card, fails, full)
    before = known()
    with pytest.raises(ConfigError, match="out of memory"):
        made(card, 4096)
    assert known() == before


def test_a_ring_has_room_for_a_page_of_any_size(card: Driver) -> None:
    memory = PageMemory.create(1, cuda_ipc.RING_BYTES + 4096)
    assert cuda_ipc.sender(memory)._ring_bytes == memory.page_bytes
