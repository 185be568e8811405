"""KV between workers under TLS: who is refused, how that reads, and what can't be encrypted."""

import asyncio
import socket

import pytest

from baton.decode_worker.io.intake import Intake
from baton.kv import transport as transports
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import tcp
from baton.kv.wire import preflight, secured
from baton.kv.wire.base import ReplyStream
from baton.protos.errors import ConfigError, WorkerLost
from baton.tls.identity import Identity, TlsFiles
from tests.tls.papers import files, identity


@pytest.fixture
def receiver():
    """A KV port that speaks TLS, on the running loop."""

    def open_(**options):
        return tcp.listen("127.0.0.1", Answering().accept, identity=identity("worker", "the KV port", ("worker",)))

    return open_


class Answering:
    """Acknowledges probes by a real Intake, of which nothing else is asked in this file."""

    def accept(self, line: ReplyStream):
        memory = PageMemory.create(1, 4096)
        return Intake(memory, None, "", lambda message: None).accept(line)  # type: ignore[arg-type]


async def measured(address: str, who: Identity | None) -> preflight.LinkSpeed:
    memory = preflight.probe_memory()
    transport = tcp.TcpTransport(2, who)
    try:
        return await preflight.measure(transport, address, memory, asyncio.get_running_loop().time)
    finally:
        await transport.close()
        memory.close()


async def test_workers_of_one_ca_exchange_kv(receiver) -> None:
    server, address = receiver()
    assert (await measured(address, identity())).bytes_per_s > 0
    server.close()


@pytest.mark.parametrize(
    ("who", "cause"),
    [
        (lambda: None, "plaintext"),
        (lambda: identity("worker", of="stranger"), "unable to get local issuer certificate"),
        (lambda: identity("expired"), "certificate has expired"),
        (lambda: identity("nobody"), "somebody.example, not worker.baton.internal"),
        (lambda: identity("router"), "not worker.baton.internal"),
    ],
    ids=["plaintext", "a stranger", "expired", "nobody", "a router"],
)
async def test_others_are_refused_and_the_receivers_log_has_the_cause(receiver, who, cause: str, caplog) -> None:
    server, address = receiver()
    with pytest.raises(WorkerLost):
        await measured(address, who())
    assert "TLS refused on the KV port from 127.0.0.1" in caplog.text
    assert cause in caplog.text
    assert not server.streams
    assert (await measured(address, identity())).bytes_per_s > 0, "who may come in still does"
    server.close()


async def test_a_sender_refuses_a_receiver_of_another_ca_and_names_the_cause(receiver) -> None:
    server, address = receiver()
    with pytest.raises(WorkerLost, match=r"no TLS with the decode worker at .*certificate is refused: self-signed"):
        await measured(address, identity("worker", ca="stranger"))
    server.close()


async def test_a_sender_that_wants_tls_never_speaks_plaintext() -> None:
    server, address = tcp.listen("127.0.0.1", Answering().accept)
    with pytest.raises(WorkerLost):
        await measured(address, identity())
    server.close()


async def test_a_peer_that_never_shakes_hands_is_dropped(receiver, monkeypatch, caplog) -> None:
    monkeypatch.setattr(secured, "HANDSHAKE_S", 0.1)
    server, address = receiver()
    host, port = tcp.split(address)
    reader, writer = await asyncio.open_connection(host, port)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    assert "no handshake within 0.1 s" in caplog.text
    writer.close()
    server.close()


async def test_connections_in_their_handshake_end_with_the_server(receiver) -> None:
    server, address = receiver()
    with socket.create_connection(tcp.split(address)) as visitor:
        await asyncio.sleep(0.05)
        server.close()
        visitor.settimeout(30)
        assert visitor.recv(1) == b""


def test_what_cannot_be_encrypted_is_refused_by_name_unless_the_network_is_trusted() -> None:
    own = files("worker")
    for name in ("auto", "grpc", "tcp", "shm"):
        assert transports.check_secured(name, own) == name
    with pytest.raises(ConfigError, match=r"worker\.kv_transport nccl can't be encrypted.*trusted_network = true"):
        transports.check_secured("nccl", own)
    trusting = TlsFiles(own.cert, own.key, own.ca, trusted_network=True)
    assert transports.check_secured("nccl", trusting) == "nccl"
    assert transports.check_secured("nccl", None) == "nccl"


async def test_a_transport_that_cannot_be_encrypted_is_not_even_tried_under_tls(monkeypatch) -> None:
    monkeypatch.setattr(transports, "ENCRYPTED", {"grpc"})
    memory = PageMemory.create(1, 4096)
    with pytest.raises(ConfigError, match=r"worker\.kv_transport tcp can't be encrypted"):
        transports.sender("tcp", memory, identity())
    memory.close()
