"""nccl where an engine shares its pages on a card: staging lies there, and kernels fill and empty it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from baton.engine import mover
from baton.kernels.cuda.library import SIMT_ENV
from baton.kv.memory.cuda_driver import Driver
from baton.kv.transport import nccl
from baton.kv.wire import channels
from baton.kv.wire.moving import ChannelBroken, ChannelLeft, JoinChannel, MoverClient
from baton.kv.wire.poller import Poller
from baton.kv.wire.sending import Lane
from baton.protos.errors import BatonError, ConfigError, WorkerLost
from baton.protos.measurements import SharedPages
from tests.kv.transport.cards import Cards, known, take_card
from tests.kv.transport.rigs import Rig, stand_in_driver
from tests.kv.transport.test_handoffs import BLOCKS, until


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return take_card(monkeypatch)


@pytest.mark.thorough  # the stand-in of a card beside real processes; without them: test_card.py
async def test_by_nccl_a_channels_staging_lies_on_the_card(
    card: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mover is a process of its own; what it moves here is the stand-in's memory, over gloo."""
    (tmp_path / "libcuda.so.1").symlink_to(stand_in_driver())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv(SIMT_ENV, "1")
    pair, client = Cards(card), MoverClient()
    server, address = nccl.listen("127.0.0.1", pair.intake.accept, client, pair.memory.device)
    pair.rig = Rig(nccl.NcclTransport(pair.source, client), address, asyncio.Event().wait)
    for resident in (set(range(BLOCKS)), set(), {1, 5, 6}):
        pair.admit()
        pair.resident = resident
        await asyncio.wait_for(pair.handed(), 60)
        want = [
            pair.ours.page(page) if len(resident) == BLOCKS else bytes(pair.source.page(page))
            for page in pair.order
        ]
        assert pair.landed() == pair.arrived() == want
        assert pair.said_resident() == set(range(BLOCKS))
        await pair.end()
    held = known()
    await pair.rig.transport.close()
    await until(lambda: known() == held - 1)  # the sender's staging, once the mover has let go
    server.close()
    pair.ours.close()
    pair.theirs.close()
    assert known() == 0


def test_a_mover_without_nccl_refuses_staging_on_a_card_by_name(
    card: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SIMT_ENV, raising=False)
    with pytest.raises(ConfigError, match=r"blocks on a card go by NCCL, and this torch has no") as refusal:
        mover.card(SharedPages(card.card, bytes(64), 1))
    assert refusal.value.param == "worker.kv_transport"
    monkeypatch.setenv(SIMT_ENV, "1")
    with pytest.raises(ConfigError, match=r"staging is on card 0909.*this process sees 0707"):
        mover.card(SharedPages("09" * 16, bytes(64), 1))
    assert mover.card(SharedPages(card.card, bytes(64), 1)) is card


def failing(error: BatonError) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise error

    return fail


class Senders:
    """A sender over a mover that is played, and receivers that take every stream, each at a port of its own."""

    def __init__(self, card: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pair, client = Cards(card), MoverClient()
        self.hears: list[Callable[..., None]] = []
        monkeypatch.setattr(client, "join", lambda join, staging, hear: self.hears.append(hear))
        monkeypatch.setattr(client, "leave", lambda name, free: free())
        self.transport, self.servers = nccl.NcclTransport(self.pair.source, client), list[asyncio.Server]()
        self.before = known()

    async def receiver(self) -> str:
        """Returns the address of a new receiver, as of a worker that was started anew."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(channels.READY)
            await reader.read()
            writer.close()

        self.servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        port = self.servers[-1].sockets[0].getsockname()[1]
        return f"127.0.0.1:{port}/{port}"

    async def stream(self, address: str) -> None:
        await (await self.transport.connect(address)).close()

    @property
    def staged(self) -> int:
        """How many channels have staging memory on the card."""
        return known() - self.before

    async def close(self) -> None:
        await self.transport.close()
        for server in self.servers:
            server.close()
        assert self.staged == 0
        self.pair.ours.close()
        self.pair.theirs.close()


async def test_a_channel_that_broke_while_no_stream_used_it_leaves_nothing_on_the_card(
    card: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders = Senders(card, monkeypatch)
    address, other = await senders.receiver(), await senders.receiver()
    for at, again in ((address, address), (address, other)):
        await senders.stream(at)
        assert senders.staged == 1
        senders.hears[-1](ChannelBroken("x", "its peer died"))
        await senders.stream(again)
        assert senders.staged == 1, "the new one"
    await senders.close()


async def test_channels_to_workers_that_have_left_are_left_in_time(
    card: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders = Senders(card, monkeypatch)
    await senders.stream(first := await senders.receiver())
    await senders.stream(first)
    assert len(senders.hears) == senders.staged == 1, "one is kept for the next stream"
    monkeypatch.setattr(nccl, "IDLE_S", -1.0)
    await senders.stream(await senders.receiver())
    assert senders.staged == 1, "of the address that is used now"
    await senders.close()


async def test_channels_are_left_in_time_although_nobody_connects_any_more(
    card: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "IDLE_S", 0.01)
    senders = Senders(card, monkeypatch)
    await senders.stream(await senders.receiver())
    await until(lambda: senders.staged == 0)
    await senders.close()


async def test_a_stream_that_is_cancelled_while_it_is_opened_leaves_its_channel(
    card: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders = Senders(card, monkeypatch)
    await senders.stream(address := await senders.receiver())
    dialled = asyncio.Event()

    async def dial(target: str, hello: bytes) -> socket.socket:
        dialled.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(nccl, "_dial", dial)
    connecting = asyncio.ensure_future(senders.transport.connect(address))
    await dialled.wait()
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    assert senders.staged == 0
    await senders.close()


FULL = ConfigError("worker.kv_transport cuda_ipc: cuMemAlloc_v2: out of memory (2)", "worker.kv_transport")


async def test_a_channel_that_is_not_opened_leaves_nothing_on_the_card(
    card: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, client = Cards(card), MoverClient()
    monkeypatch.setattr(client, "join", failing(WorkerLost("the mover process died")))
    before, join = known(), JoinChannel("0-a", "a", 0, "127.0.0.1", 1, "127.0.0.1", 0)
    with pytest.raises(WorkerLost, match="the mover process died"):
        channels.StagingChannel(client, join, 1 << 16, pair.memory.device)
    assert known() == before
    pair.ours.close()
    pair.theirs.close()


@pytest.mark.parametrize("end", ["lets go", "dies"])
async def test_staging_on_the_card_stays_until_the_mover_has_let_go_of_it(card: Driver, end: str) -> None:
    """The mover may be in the middle of a message when the channel is left."""
    pair, client = Cards(card), MoverClient()
    client._sock, mover_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client._watch()
    before, join = known(), JoinChannel("0-a", "a", 0, "127.0.0.1", 1, "127.0.0.1", 0)
    channel = channels.StagingChannel(client, join, 1 << 16, pair.memory.device)
    channel.leave()
    await asyncio.sleep(0.02)
    assert known() == before + 1
    if end == "lets go":
        mover_end.send(msgspec.msgpack.encode(ChannelLeft("0-a")))
    else:
        mover_end.close()
    await until(lambda: known() == before)
    client.close()
    mover_end.close()
    pair.ours.close()
    pair.theirs.close()


async def test_a_sender_without_room_on_its_card_hangs_up(card: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, client, hung_up = Cards(card), MoverClient(), asyncio.Event()

    async def receiver(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(channels.READY)
        await reader.read()
        hung_up.set()
        writer.close()

    server = await asyncio.start_server(receiver, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = nccl.NcclTransport(pair.source, client)
    monkeypatch.setattr(card, "allocate", failing(FULL))
    with pytest.raises(ConfigError, match="out of memory"):
        await transport.connect(f"127.0.0.1:{port}/{port}")
    await asyncio.wait_for(hung_up.wait(), 30)
    await transport.close()
    server.close()
    pair.ours.close()
    pair.theirs.close()


async def test_a_stream_whose_card_takes_no_bytes_is_lost(card: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender then measures its ways anew."""
    pair, client, poller = Cards(card), MoverClient(), Poller()
    monkeypatch.setattr(client, "join", lambda *arguments: None)
    join = JoinChannel("1-a", "a", 1, "127.0.0.1", 1, "127.0.0.1", 0)
    channel = channels.StagingChannel(client, join, 1 << 16, pair.source.device)
    channel.joined = True
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    stream = nccl.NcclStream(Lane(ours, "there", poller), {}, channel, channel.leave)
    monkeypatch.setattr(card, "upload", failing(FULL))
    with pytest.raises(WorkerLost, match=r"the handoff stream to there broke: .*out of memory"):
        await stream.send(*pair.frame(0))
    await stream.close()
    await asyncio.sleep(0.02)
    poller.close()
    theirs.close()
    pair.ours.close()
    pair.theirs.close()
