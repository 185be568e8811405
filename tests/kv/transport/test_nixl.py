"""Tests what is nixl's own: a host without it, a sender that shows too much or goes away, memory that others
own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import check_secured, nixl
from baton.kv.wire import nixl_receiving, one_sided
from baton.kv.wire.one_sided import NixlAgent, NixlReader, Remote
from baton.protos.errors import ConfigError, CorruptFrame, WorkerLost
from baton.tls.identity import TlsFiles
from tests.kv.transport.rigs import nixl_rig
from tests.kv.transport.test_contract import Peer, PeerSink, Rigged, answer


@pytest.fixture
async def rigged(tmp_path: Path):
    memory, peer = PageMemory.create(8, 1 << 20), Peer()
    for page in range(8):
        memory.page(page)[:] = bytes([page + 1]) * (1 << 20)
    made = await nixl_rig(peer.accept, memory, tmp_path)
    yield Rigged(made.transport, made.address, peer, made.stop, memory)
    await made.transport.close()
    await made.stop()


def test_without_nixl_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_sided, "API", "nixl_that_is_not_here")
    with pytest.raises(ConfigError, match=r"baton-serve\[nixl\]"):
        nixl.sender(PageMemory.create(1, 4096))


def test_it_cannot_be_encrypted_and_needs_a_network_that_is_trusted() -> None:
    papers = TlsFiles("ca", "cert", "key")
    with pytest.raises(ConfigError, match="nixl can't be encrypted"):
        check_secured("nixl", papers)
    assert check_secured("nixl", msgspec.structs.replace(papers, trusted_network=True)) == "nixl"


async def test_a_block_beyond_the_shown_memory_ends_the_stream(rigged: Rigged) -> None:
    stream = await rigged.connect()
    frame, payload = rigged.pages(1)
    await stream.send(msgspec.structs.replace(frame, offsets=(8 << 20,)), payload)
    await asyncio.wait_for(rigged.peer.ended.wait(), 20)
    assert "beyond the sender's memory" in rigged.peer.errors[0].message
    await stream.close()


async def test_bytes_that_changed_on_the_way_do_not_count_and_are_told_apart(rigged: Rigged) -> None:
    stream = await rigged.connect()
    frame, payload = rigged.pages(2)
    rigged.memory.page(2)[:4] = b"\xff" * 4  # after the checksum was taken
    await stream.send(frame, payload)
    with pytest.raises(WorkerLost):  # the peer's assertion that checksums agree ends the stream
        await asyncio.wait_for(stream.receive(), 20)
    assert rigged.peer.blocks == []
    await stream.close()


async def test_a_sender_whose_memory_is_gone_breaks_its_stream_alone(rigged: Rigged) -> None:
    reader, agent = NixlReader(), NixlAgent()
    view = memoryview(bytearray(4096))
    at = agent.register(view)
    here = Remote(agent.metadata(), at, 4096)
    staging = reader.staging(4096)
    await asyncio.wait_for(reader.read(here, (0,), 4096, staging), 20)
    agent.close()
    with pytest.raises(ConfigError, match="NIXL can't read"):
        await asyncio.wait_for(reader.read(here, (0,), 4096, staging), 20)
    reader.close()
    stream = await rigged.connect()
    await stream.send(*rigged.pages(3))
    await answer(stream)
    assert rigged.peer.blocks == [bytes([4]) * (1 << 20)]
    await stream.close()


async def test_staging_is_used_again_once_nothing_is_under_way_to_it(rigged: Rigged, monkeypatch) -> None:
    made: list[int] = []
    real = one_sided.Staging.__init__
    monkeypatch.setattr(
        one_sided.Staging, "__init__", lambda self, agent, size: made.append(size) or real(self, agent, size)
    )
    for _ in range(3):
        stream = await rigged.connect()
        for number in range(6):
            await stream.send(*rigged.pages(number, number + 1))
        for _ in range(6):
            await answer(stream)
        await stream.close()
    assert len(made) <= nixl_receiving.AT_ONCE


async def test_a_frame_that_the_sink_can_not_place_keeps_no_staging(rigged: Rigged, monkeypatch) -> None:
    made: list[int] = []
    real = one_sided.Staging.__init__
    monkeypatch.setattr(
        one_sided.Staging, "__init__", lambda self, agent, size: made.append(size) or real(self, agent, size)
    )
    monkeypatch.setattr(PeerSink, "place", lambda self, frame: (_ for _ in ()).throw(CorruptFrame("no", "unit")))
    for number in range(4):
        stream = await rigged.connect()
        await stream.send(*rigged.pages(1))
        await until(lambda streams=number + 1: len(rigged.peer.errors) == streams)
        await stream.close()
    assert len(made) <= nixl_receiving.AT_ONCE


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.001)


async def test_a_read_that_nobody_waits_for_gives_its_staging_back_at_its_end_or_is_given_up(monkeypatch) -> None:
    reader, agent = NixlReader(), NixlAgent()
    view = memoryview(bytearray(4096))
    here = Remote(agent.metadata(), agent.register(view), 4096)
    staging = reader.staging(4096)
    reader.read(here, (0,), 4096, staging).cancel()
    await until(lambda: reader._idle == [staging])
    monkeypatch.setattr(NixlAgent, "ended", lambda self, handle: False)
    given_up: list[object] = []
    monkeypatch.setattr(NixlAgent, "give_up", lambda self, handle: given_up.append(handle))
    monkeypatch.setattr(one_sided, "ABANDONED_S", 0.01)
    reader.read(here, (0,), 4096, reader.staging(4096)).cancel()
    await until(lambda: bool(given_up))
    assert reader._idle == []
    agent.close()
    reader.close()


def test_metadata_that_no_hello_can_carry_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_sided, "MOST_METADATA", 3)
    agent = NixlAgent()
    with pytest.raises(ConfigError, match="UCX_NET_DEVICES"):
        agent.metadata()
    agent.close()
