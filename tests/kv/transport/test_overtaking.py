"""Frames of one stream overtake each other on its lanes: the receiver takes them in order, or says why not."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.kv.transport import tcp
from baton.kv.wire import control, frames, incoming, inlet
from baton.kv.wire.frames import HEADER_BYTES, Frame, Kind
from baton.kv.wire.inlet import Inlet
from baton.kv.wire.sending import hello
from tests.kv.transport.rigs import Rig
from tests.kv.transport.test_handoffs import BLOCKS, FIRST, LAYOUT, LEASE, Pair, admitted, until


@pytest.fixture
def lane_0_is_read_last(monkeypatch: pytest.MonkeyPatch) -> list[Frame]:
    """Delays reading a stream's first lane until a frame came on another one; returns the frames that came
    there.
    """
    seen: list[Frame] = []
    turn, deal = Inlet._turn, Inlet._frame

    def late(self: Inlet) -> None:
        if self.incoming is None or self.incoming.primary is not self or seen:
            turn(self)

    def note(self: Inlet, frame: Frame, session: Any) -> int:
        if session.primary is not self:
            seen.append(frame)
        return deal(self, frame, session)

    monkeypatch.setattr(Inlet, "_turn", late)
    monkeypatch.setattr(Inlet, "_frame", note)
    return seen


@pytest.mark.parametrize("name", ["tcp, 3 lanes", "tcp, 3 lanes, TLS"])
async def test_blocks_that_overtake_the_opening_of_their_handoff_wait_for_it(
    name: str, tmp_path: Path, lane_0_is_read_last: list[Frame]
) -> None:
    async with admitted(name, tmp_path) as pair:
        handoff = pair.handoff()
        handoff._frame_bytes = LAYOUT.page_bytes  # a frame a block: they take all lanes
        handoff.ship(pair.ship(*range(BLOCKS)))
        handoff.commit(FIRST, 0)
        await asyncio.wait_for(handoff.run(), 30)
        assert lane_0_is_read_last[0].kind is Kind.BLOCK
        assert pair.arrived() == pair.sent()
        assert not pair.intake.refusals


async def connected(
    address: str, lane: int, stream: bytes, frame: Frame, payload: list[memoryview]
) -> socket.socket:
    """One lane by hand, with one frame."""
    host, port = tcp.split(address)
    sock = socket.create_connection((host, port))
    sock.sendall(hello(lane, stream) + frames.message(frame, payload))
    sock.setblocking(False)
    return sock


async def answer(sock: socket.socket) -> Frame:
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(30):
        while len(data) < HEADER_BYTES or len(data) < HEADER_BYTES + frames.body_bytes(data):
            data += await loop.sock_recv(sock, 1)
    return frames.decode(data)


async def test_blocks_whose_opening_never_comes_are_refused_after_a_while_and_nothing_is_read_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inlet, "OVERTAKEN_S", 0.05)
    monkeypatch.setattr(incoming, "LINGER_S", 60.0)  # the refused stream is still known when its first lane comes
    async with admitted("tcp, 3 lanes", tmp_path) as pair:
        stream = b"s" * 16
        block, payload = pair.frame(0)
        lane = await connected(
            pair.rig.address,
            1,
            stream,
            msgspec.structs.replace(block, subject=1),
            [*payload, memoryview(b"x" * 4096)],
        )
        await until(lambda: pair.intake.refusals["corrupt_frame"] == 1)
        assert not pair.told
        assert not any(map(any, pair.arrived())), "not one byte of it is anywhere"
        first = await connected(pair.rig.address, 0, stream, pair.opening(), [])
        said = await answer(first)
        assert said.kind is Kind.ERROR
        assert b"not in 0.05 s" in bytes(said.body)
        first.close()
        lane.close()


async def test_a_commit_that_overtakes_blocks_waits_for_each_of_them(tmp_path: Path) -> None:
    async with admitted("tcp, 3 lanes", tmp_path) as pair:
        stream, whole = b"s" * 16, [pair.frame(i, subject=1) for i in range(BLOCKS)]
        first = await connected(pair.rig.address, 0, stream, pair.opening(), [])
        assert (await answer(first)).subject == Kind.OPEN
        first.setblocking(True)
        first.sendall(frames.encode(closing(pair)))
        others = [await connected(pair.rig.address, 1 + n, stream, *frame) for n, frame in enumerate(whole)]
        await until(lambda: pair.intake.received_blocks == BLOCKS)
        await until(lambda: not pair.intake.open_streams)
        assert pair.arrived() == pair.sent()
        assert not pair.intake.refusals
        for sock in (first, *others):
            sock.close()


def closing(pair: Pair) -> Frame:
    body = control.encode_closing(control.Closing(FIRST, 0))
    return Frame(Kind.COMMIT, LEASE, pair.epoch, body, sequence=BLOCKS)


async def receive(calls: Connection, busy_s: float) -> None:
    """Take handoffs, one at each call; the loop stands still for ``busy_s`` whenever a connection is there."""
    pairs: list[Pair] = []
    server, address = tcp.listen("127.0.0.1", lambda line: pairs[-1].intake.accept(line))
    calls.send(address)
    while True:
        pairs[:] = [Pair()]
        pairs[0].admit()
        calls.send("ready")
        while not calls.poll():
            await asyncio.sleep(0.0005)
            time.sleep(busy_s if server._inlets else 0)
        if calls.recv() == "end":
            return
        calls.send((pairs[0].arrived() == pairs[0].sent(), dict(pairs[0].intake.refusals)))


def receiver(calls: Connection, busy_s: float) -> None:
    asyncio.run(receive(calls, busy_s))


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("busy_s", [0.0, 0.02])
async def test_a_thousand_handoffs_over_four_lanes_to_a_process_of_its_own_are_all_taken(busy_s: float) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=receiver, args=(theirs, busy_s), daemon=True)
    process.start()
    pair, transport = Pair(), tcp.TcpTransport(lanes=4)
    pair.rig = Rig(transport, ours.recv(), transport.close)
    pair.epoch = 1
    for _ in range(1000):
        assert ours.recv() == "ready"
        handoff = pair.handoff()
        handoff._frame_bytes = LAYOUT.page_bytes
        handoff.ship(pair.ship(*range(BLOCKS)))
        handoff.commit(FIRST, 0)
        await asyncio.wait_for(handoff.run(), 20)
        ours.send("look")
        assert ours.recv() == (True, {})
    ours.recv()
    ours.send("end")
    process.join(30)
    await transport.close()
