"""Accepting without descriptors, and whom the connections lets in."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from types import SimpleNamespace

import pytest

from baton.router.edge import acceptor
from baton.router.edge.acceptor import Acceptor
from baton.router.edge.connection_table import ConnectionTable, EdgeLimits, Phase, network_of


class Poor(socket.socket):
    """A listener in a process that has no descriptors left."""

    poor = True
    tried = 0

    def accept(self):
        self.tried += 1
        if self.poor:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class Echo(asyncio.Protocol):
    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


async def test_a_process_without_descriptors_rests_says_so_once_and_serves_who_comes_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "REST_S", 0.02)
    caplog.set_level(logging.WARNING)
    listener = Poor()
    listener.bind(("127.0.0.1", 0))
    listener.listen(8)
    accepting = Acceptor(
        listener, ConnectionTable(EdgeLimits(), asyncio.get_running_loop().time), lambda entry: Echo()
    )
    begun = asyncio.get_running_loop().time()
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    while listener.tried < 3:
        await asyncio.sleep(0.001)
    assert listener.tried <= 2 + (asyncio.get_running_loop().time() - begun) / 0.02
    listener.poor = False
    writer.write(b"hello")
    assert await asyncio.wait_for(reader.readexactly(5), 30) == b"hello"
    assert [r.message for r in caplog.records].count("no connection can be accepted: Too many open files, "
        "raise `ulimit -n`; trying again every 0.02 s") == 1  # fmt: skip
    writer.close()
    accepting.close()
    await accepting.wait_closed()
    listener.close()


def connection(connections: ConnectionTable, host: str, phase: Phase = Phase.ANSWER) -> SimpleNamespace:
    entry = connections.enter(host)
    assert entry is not None
    found = SimpleNamespace(entry=entry, phase=phase, since=connections.clock(), dropped=False)
    found.look = lambda now: None
    found.drop = lambda: setattr(found, "dropped", True)
    entry.connection = found
    return found


def test_the_longest_idle_makes_room_then_the_oldest_that_never_asked_and_nobody_who_is_served() -> None:
    now = SimpleNamespace(s=0.0)
    connections = ConnectionTable(EdgeLimits(max_connections=4), lambda: now.s)
    served, fresh = connection(connections, "10.0.0.1"), connection(connections, "10.0.0.2", Phase.FRESH)
    idle = [connection(connections, "10.0.0.3", Phase.IDLE), connection(connections, "10.0.0.4", Phase.IDLE)]
    idle[0].since = 5.0
    assert not connection(connections, "10.0.0.5").entry.spare
    assert idle[1].dropped
    assert not connection(connections, "10.0.0.6").entry.spare
    assert idle[0].dropped
    assert connection(connections, "10.0.0.7").entry.spare  # the fresh one is too young
    now.s = 2.0
    assert not connection(connections, "10.0.0.8").entry.spare
    assert fresh.dropped
    assert not served.dropped


def test_places_are_counted_by_address_and_given_back_once() -> None:
    connections = ConnectionTable(EdgeLimits(max_per_address=1), lambda: 0.0)
    first = connection(connections, "10.0.0.1")
    assert connection(connections, "10.0.0.1").entry.spare
    assert not connection(connections, "10.0.0.2").entry.spare
    connections.leave(first.entry)
    connections.leave(first.entry)
    assert not connection(connections, "10.0.0.1").entry.spare
    assert len(connections) == 3


def test_an_ipv6_client_is_counted_by_its_network() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::2%eth0")
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of("10.0.0.1") != network_of("10.0.0.2")
