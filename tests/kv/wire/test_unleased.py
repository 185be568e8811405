"""A data port among strangers: they get little of it, for a little while, and never a peer's place."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from typing import Any

import msgspec
import pytest

from baton.kv.transport import tcp
from baton.kv.transport.grpc import MAX_MESSAGE_BYTES, RECEIVED_BYTES, SERVER_OPTIONS, server_options
from baton.kv.wire import frames, incoming, inlet, receiving, unleased
from baton.kv.wire.frames import Frame, Kind
from baton.kv.wire.receiving import SocketServer
from baton.kv.wire.sending import hello
from baton.kv.wire.unleased import UnleasedConnections
from tests.kv.transport.rigs import Rig
from tests.kv.transport.test_handoffs import Pair, until
from tests.kv.transport.test_overtaking import answer
from tests.tls.papers import identity


class Door:
    """A decode worker behind a data port, and sockets that knock at it."""

    def __init__(self) -> None:
        self.pair = Pair()
        self.server, self.address = tcp.listen("127.0.0.1", self.pair.intake.accept)
        self.transport = tcp.TcpTransport(lanes=2)
        self.pair.rig = Rig(self.transport, self.address, self.transport.close)
        self.pair.admit()
        self.socks: list[socket.socket] = []

    def knock(self, *said: bytes) -> socket.socket:
        sock = socket.create_connection(tcp.split(self.address))
        self.socks.append(sock)
        sock.sendall(b"".join(said))
        sock.setblocking(False)
        return sock

    async def end(self) -> None:
        for sock in self.socks:
            sock.close()
        await self.pair.end()
        await self.transport.close()
        self.server.close()


@pytest.fixture
async def door() -> Any:
    made = Door()
    yield made
    await made.end()


def is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def test_who_says_nothing_after_hello_is_told_so_and_closed_and_who_holds_a_lease_may_be_silent(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SocketServer, "idle_s", 0.25)
    peer = door.knock(hello(0, b"p" * 16), frames.encode(door.pair.opening()))
    assert (await answer(peer)).kind is Kind.ACK
    idle = door.knock(hello(0, b"i" * 16))
    said = await answer(idle)
    assert said.kind is Kind.ERROR
    assert b"no lease was shown for 0.25 s" in bytes(said.body)
    assert door.pair.intake.open_streams == 1
    assert not is_closed(peer)


async def test_who_says_nothing_at_all_is_closed(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inlet, "HELLO_S", 0.05)
    silent, halfway = door.knock(), door.knock(hello(0, b"h" * 16)[:7])
    await until(lambda: is_closed(silent) and is_closed(halfway))


async def test_strangers_without_number_shut_out_nobody_else(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unleased, "MAX_FROM_ONE", 20)
    for number in range(60):
        door.knock(*[hello(0, os.urandom(16))][: number % 2])
    await until(lambda: sum(map(is_closed, door.socks)) >= 40)
    await door.pair.whole()
    assert len(door.server.unleased) <= 20


async def test_a_peer_with_a_lease_makes_room_for_no_stranger(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unleased, "MAX_FROM_ONE", 4)
    stream = b"p" * 16
    lanes = [door.knock(hello(0, stream), frames.encode(door.pair.opening())), door.knock(hello(1, stream))]
    assert (await answer(lanes[0])).kind is Kind.ACK
    strangers = [door.knock() for _ in range(12)]
    await until(lambda: sum(map(is_closed, strangers)) >= 8)
    assert not any(map(is_closed, lanes))
    assert door.pair.intake.open_streams == 1


def test_the_oldest_of_the_address_with_most_makes_room() -> None:
    class Guest:
        closed = False

        def close(self, reset: bool = False) -> None:
            self.closed = True

    strangers, crowd, others = UnleasedConnections(), [Guest() for _ in range(200)], [Guest() for _ in range(400)]
    for guest in crowd:
        strangers.add(guest, "the crowd")
    for number, guest in enumerate(others):
        strangers.add(guest, f"10.0.0.{number % 250}")
    assert len(strangers) == unleased.MAX_STRANGERS
    assert [guest.closed for guest in crowd] == [True] * 88 + [False] * 112
    assert not any(guest.closed for guest in others)
    assert strangers.remove(crowd[199]) == "the crowd"
    assert strangers.remove(crowd[199]) == ""


async def test_nothing_large_is_read_before_a_lease_was_shown(door: Door) -> None:
    large = Frame(Kind.OPEN, b"?" * 16, 1, bytes(inlet.STRANGERS_BODY_BYTES + 1))
    stranger = door.knock(hello(0, b"s" * 16), frames.encode(large)[: frames.HEADER_BYTES])
    said = await answer(stranger)
    assert said.kind is Kind.ERROR
    assert b"before any lease was shown" in bytes(said.body)
    whole = msgspec.structs.replace(large, body=bytes(inlet.STRANGERS_BODY_BYTES))
    assert (await answer(door.knock(hello(0, b"t" * 16), frames.encode(whole)))).kind is Kind.ERROR
    assert door.pair.intake.refusals == {"corrupt_frame": 1, "lease_unknown": 1}


async def test_a_stream_of_too_many_lanes_is_refused_the_rest(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "MAX_LANES", 3)
    lanes = [door.knock(hello(number, b"s" * 16)) for number in range(5)]
    await until(lambda: sum(map(is_closed, lanes)) == 2)


async def test_a_port_without_descriptors_rests_says_so_once_and_goes_on(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Scarce(socket.socket):
        asked, refused = 0, 3

        def accept(self) -> tuple[socket.socket, Any]:
            Scarce.asked += 1
            if Scarce.asked <= self.refused:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    monkeypatch.setattr(receiving, "REST_S", 0.02)
    stranger = door.knock()
    await until(lambda: len(door.server.unleased) == 1)
    door.server._sock = Scarce(fileno=door.server._sock.detach())
    with caplog.at_level(logging.WARNING, logger="baton.kv"):
        begun = asyncio.get_running_loop().time()
        door.knock()
        await until(lambda: Scarce.asked > 0)
        for _ in range(50):
            await asyncio.sleep(0)
        rests = (asyncio.get_running_loop().time() - begun) / receiving.REST_S
        assert Scarce.asked <= 1 + rests, "it does not spin"
        await until(lambda: is_closed(stranger))
        await door.pair.whole()
    assert Scarce.asked > 3
    assert [record.message for record in caplog.records] == [
        f"no sender of KV can be accepted for now: {os.strerror(errno.EMFILE)}"
    ]


def test_a_worker_takes_messages_of_its_pages_and_no_larger_ones() -> None:
    name = "grpc.max_receive_message_length"
    assert dict(SERVER_OPTIONS)[name] == MAX_MESSAGE_BYTES
    assert dict(server_options(1 << 20))[name] == RECEIVED_BYTES
    assert dict(server_options(64 << 20))[name] == 72 << 20
    assert [key for key, _ in server_options(1)] == [key for key, _ in SERVER_OPTIONS]


async def test_a_tls_port_counts_those_in_their_handshake_as_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unleased, "MAX_FROM_ONE", 4)
    server, address = tcp.listen("127.0.0.1", Pair().intake.accept, identity=identity("worker", "x", ("worker",)))
    socks = [socket.create_connection(tcp.split(address)) for _ in range(10)]
    for sock in socks:
        sock.setblocking(False)
    await until(lambda: sum(map(is_closed, socks)) == 6)
    assert len(server.unleased) == 4
    server.close()
    assert not len(server.unleased)
    for sock in socks:
        sock.close()
