"""Hosts of ranks that encrypt: one rank's answers, certificates refused by name, bytes that were changed."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.engine.backends.ranks.hosts.control import NONCE, dial
from baton.engine.backends.ranks.hosts.links import HostMemory, Links, LinkServer
from baton.engine.backends.ranks.hosts.relay import relayed
from baton.engine.backends.ranks.hosts.secured import dial_securely, rank_identity
from baton.engine.backends.ranks.link_plan import LinkPlan
from baton.engine.backends.ranks.runner import RankRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.kernels.abi import native
from baton.kernels.collective.native import RankIsLost, group_bytes
from baton.protos.errors import ConfigError, RankLost, StartupError
from baton.protos.nouns import Sampling
from baton.tls.identity import Identity, TlsFiles
from baton.tls.sockets import TlsSocket, accepting, step_handshake
from tests.conformance.checkpoints import make
from tests.e2e.fleet import wait_for
from tests.engine.backends.ranks.other_host import children, other_host, serving_agent
from tests.engine.backends.ranks.same_bits import same_bits
from tests.engine.backends.ranks.threads import SharedDriver
from tests.tls.papers import authority, files, identity

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

FIELD = "worker.rank_hosts"
GREEDY = Sampling(temperature=0.0, max_tokens=6)
PROMPTS = [[1, 2, 3], [4] * 40]
PLAIN = None
EXPIRED, STRANGER, ROUTER = files("expired"), files("worker", ca="theirs", of="theirs"), files("router")
OURS = files("worker")


def own(tls: TlsFiles | None = OURS) -> Identity | None:
    return rank_identity(tls, "a port")


def test_ranks_of_hosts_that_encrypt_have_the_bits_of_one(tmp_path: Path) -> None:
    same_bits(make(tmp_path, "qwen2_mixed"), 4, "tp2+pp2", hosts=2, tls=OURS)


@pytest.mark.thorough  # its bits and refusals: the tests around it; a lost rank of another host: ../test_hosts.py
def test_a_worker_answers_as_one_rank_by_tls_and_ends_with_a_rank_of_the_other_host(tmp_path: Path) -> None:
    model = str(make(tmp_path, "qwen2"))
    alone = SharedDriver(load_runner(EngineConfig(model, threads=1)), 16).answer(PROMPTS, GREEDY)
    heard, told = threading.Event(), list[RankLost]()
    with other_host(BATON_TLS__DIR=str(authority().folder)) as (address, agent):
        far = EngineConfig(model, threads=1, tp=2, rank_bound_s=60.0, rank_hosts=(address,))
        with pytest.raises(StartupError, match="speaks TLS, and this worker doesn't"):
            load_runner(far)
        runner = load_runner(
            EngineConfig(model, threads=1, tp=2, rank_bound_s=60.0, rank_hosts=(address,), tls=OURS)
        )
        assert isinstance(runner, RankRunner)
        try:
            driver = SharedDriver(runner, 16)
            assert driver.answer(PROMPTS, GREEDY) == alone
            runner.watch(lambda error: (told.append(error), heard.set()))
            os.kill(children(children(agent)[0])[0], 9)
            assert heard.wait(60)
            assert "rank 1 ended by itself (signal 9), of 2 ranks" in told[0].message
        finally:
            runner.leave()
        wait_for(lambda: not children(agent), what="the session's end")


@pytest.mark.parametrize(
    ("host", "lead", "said"),
    [
        (OURS, PLAIN, "speaks TLS, and this worker doesn't: set"),
        (PLAIN, OURS, "what came is not TLS: the peer speaks plaintext"),
        (OURS, EXPIRED, "the peer says that our certificate has expired"),
        (EXPIRED, OURS, "the peer's certificate is refused: certificate has expired"),
        (OURS, STRANGER, "the peer's certificate is refused: .*(issuer|self-signed)"),
        (OURS, files("worker", of="theirs"), "the peer does not know the CA of our certificate"),
        (OURS, ROUTER, "refuses this worker's certificate, and its log says why"),
        (ROUTER, OURS, "the peer's certificate is refused: Hostname mismatch"),
    ],
    ids=["plain lead", "plain host", "lead over", "host over", "other CA", "unknown CA", "a router", "as host"],
)
def test_a_peer_without_a_workers_certificate_is_refused_by_name(
    host: TlsFiles | None, lead: TlsFiles | None, said: str
) -> None:
    with serving_agent(tls=host) as agent:
        with pytest.raises(StartupError, match=said) as refused:
            dial(agent.address, b"", FIELD, identity=own(lead))
        assert refused.value.param == FIELD
        assert agent.address in refused.value.message
        assert agent._sessions == []


def test_with_tls_no_key_is_needed_and_one_that_is_there_counts(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"a key of enough bytes")
    with serving_agent("0.0.0.0:0", tls=OURS) as agent:  # refused in plaintext
        dial(f"127.0.0.1:{agent.address.split(':')[1]}", b"", FIELD, identity=own()).close()
        wait_for(lambda: agent._sessions, what="a session")
    with serving_agent(key_file=str(tmp_path / "key"), tls=OURS) as agent:
        with pytest.raises(StartupError, match="rank_key_file isn't this one's"):
            dial(agent.address, b"another key of enough bytes", FIELD, identity=own())
    with pytest.raises(ConfigError, match=r"tls\.cert /nowhere"):
        with serving_agent(tls=TlsFiles("/nowhere", "/nowhere", "/nowhere")):
            pass


def test_a_stranger_that_begins_no_handshake_or_half_of_one_delays_no_lead() -> None:
    with serving_agent(tls=OURS) as agent:
        host, port = agent.address.split(":")
        with socket.create_connection((host, int(port)), 30), socket.create_connection((host, int(port))) as half:
            half.sendall(b"\x16\x03\x01\x02\x00\x01")  # of a client's hello
            dial(agent.address, b"", FIELD, identity=own()).close()
            wait_for(lambda: agent._sessions, what="a session")


class Wire:
    """Stands between two ends and passes bytes on from one to the other, with a bit turned once ``changes`` is
    set.
    """

    def __init__(self, to: tuple[str, int]) -> None:
        self._to, self._listener = to, socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.changes = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._to)
        threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()
        self._pass(near, far, True)

    def _pass(self, source: socket.socket, sink: socket.socket, may_change: bool) -> None:
        with source, sink:
            try:
                while got := bytearray(source.recv(1 << 16)):
                    if may_change and self.changes.is_set():
                        got[-1] ^= 1
                    sink.sendall(got)
            except OSError:
                pass


def test_bytes_that_were_changed_on_the_way_are_not_written_and_the_rank_is_lost() -> None:
    memory = mmap.mmap(-1, size := group_bytes(2, 128))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    other = mmap.mmap(-1, size)
    there = ctypes.addressof(ctypes.c_char.from_buffer(other))
    server = LinkServer("127.0.0.1", own())
    wire = Wire(server.address)
    plan = LinkPlan(os.urandom(32), (wire.address, ("127.0.0.1", 1)), (0, 1))
    server.start(plan, 0, HostMemory(address, size, address, 0, (memory,)))
    links = Links(plan, 1, there, there, 60.0, own())
    server.await_all()
    wire.changes.set()
    (fd,) = (sock.fileno() for sock in links._sockets.values())
    os.write(fd, b"\0" * 40 + b"\1" * 100)
    server.join(30)
    assert RankIsLost(int.from_bytes(memory[:4], "little")).rank == 1
    assert not any(memory[4:])
    links.close()
    server.close()


@contextmanager
def joined() -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """A TLS connection, both ends blocking."""
    ends, here = socket.socketpair(), identity()
    server = accepting(ends[0], here)
    thread = threading.Thread(target=step_handshake, args=(server, here))
    thread.start()
    client = dial_securely(ends[1], here, "nobody")
    thread.join(30)
    with server, client:
        yield server, client


def test_a_relay_passes_on_both_directions_at_once_in_order_and_then_an_end() -> None:
    said = [os.urandom(3 << 20) for _ in range(2)]
    heard = [b"", b""]

    def converse(number: int, sock: socket.socket) -> None:
        sender = threading.Thread(target=sock.sendall, args=(said[number],))
        sender.start()
        while len(heard[number]) < len(said[number]) and (got := sock.recv(1 << 16)):
            heard[number] += got
        sender.join(60)

    with joined() as ends:
        near = [relayed(end) for end in ends]
        threads = [threading.Thread(target=converse, args=each) for each in enumerate(near)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert heard == said[::-1]
        near[0].sendall(b"last words")
        near[0].close()
        near[1].settimeout(60)
        with near[1], near[1].makefile("rb") as rest:
            assert rest.read() == b"last words"


def test_a_sender_whose_peer_reads_nothing_is_told_so_in_its_time() -> None:
    with joined() as (server, client), relayed(client) as near:
        near.settimeout(0.3)
        with pytest.raises(TimeoutError):
            near.sendall(bytes(64 << 20))
        assert len(server.recv(NONCE)) == NONCE
