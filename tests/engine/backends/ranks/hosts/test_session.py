"""The process that has a worker's ranks on another host: it ends with its lead, and obeys its own build alone."""

import errno
import os
import select
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest

from baton.engine.backends.ranks.followers import Follower
from baton.engine.backends.ranks.hosts import control, lead
from baton.engine.backends.ranks.hosts.control import NONCE, SAID, Control, answer_to_lead, dial
from baton.engine.backends.ranks.hosts.greeting import Greeter
from baton.engine.backends.ranks.hosts.lead import LeadHosts, RemoteHost
from baton.engine.backends.ranks.hosts.messages import FROM_HOST, HostFailed, HostLoaded, HostStart
from baton.engine.config import EngineConfig
from baton.kernels.abi.build import sources_key
from baton.protos.errors import BatonError, RankLost, StartupError
from baton.protos.version import product_version
from tests.e2e.fleet import wait_for
from tests.e2e.test_ranks import gone
from tests.engine.backends.ranks.other_host import children, serving_agent

FAR = ("elsewhere:1",)


@pytest.mark.thorough
def test_a_lead_that_goes_while_ranks_load_takes_them_along(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # whoever reads it waits for good
    with serving_agent() as agent:
        lead = dial(agent.address, b"", "worker.rank_hosts")
        config = EngineConfig(str(tmp_path), threads=1, pp=2, rank_hosts=FAR)
        lead.send(HostStart(config, 1, 1, 2, sources_key(), product_version()))
        (session,) = wait_for(lambda: agent._sessions)
        (rank,) = wait_for(lambda: children(session.pid), what="a rank")
        lead.close()
        assert session.wait(60) == 0
        wait_for(lambda: gone(rank), what="the rank's end")


OTHER_BUILDS: list[tuple[dict[str, str], tuple[str, str]]] = [
    ({"version": "0.0.1", "kernels": "others"}, ("they are baton {ours},", "lead is baton 0.0.1; install")),
    ({"kernels": sources_key()}, ("they are baton {ours},", "lead is baton of an older version; install")),
    ({"version": "{ours}", "kernels": "others"}, ("{ours} with kernels {kernels},", "with kernels others;")),
    ({"config": "of another shape", "version": "9.9"}, ("they are baton {ours},", "lead is baton 9.9;")),
]


def test_a_lead_of_another_build_is_refused_by_both_versions_even_if_it_is_not_understood() -> None:
    names = {"ours": product_version(), "kernels": sources_key()[:12]}
    with serving_agent() as agent:
        for said, why in OTHER_BUILDS:
            lead = dial(agent.address, b"", "worker.rank_hosts")
            fields = {field: text.format(**names) for field, text in said.items()}
            lead.send_bytes(msgspec.json.encode({"type": "HostStart"} | fields))
            found = lead.receive(FROM_HOST)
            assert isinstance(found, HostFailed)
            assert all(text.format(**names) in found.error.message for text in why), found.error.message
            assert "install the same build on all hosts" in found.error.message
            lead.close()


@pytest.mark.thorough
def test_a_hosts_failure_is_told_under_its_address(tmp_path: Path) -> None:
    with serving_agent() as agent:
        config = EngineConfig(str(tmp_path / "nowhere"), threads=1, pp=2, rank_hosts=(agent.address,))
        hosts = LeadHosts(config)
        with pytest.raises(BatonError, match=rf"rank_hosts {agent.address}: .*nowhere"):
            hosts.await_ready("")
        hosts.leave()


def test_a_host_that_is_told_to_end_lets_its_leads_finish_and_takes_no_more(tmp_path: Path) -> None:
    ended, config = threading.Event(), EngineConfig(str(tmp_path), pp=2, rank_hosts=FAR)
    with serving_agent(grace_s=60.0, ended=ended) as agent:
        lead = dial(agent.address, b"", "worker.rank_hosts")
        ended.set()
        wait_for(lambda: refused(agent.address), what="no more leads")
        lead.send(HostStart(config, 1, 1, 2, "others"))
        said = lead.receive(FROM_HOST)  # its session is there, and ends now
        assert isinstance(said, HostFailed)
        assert "another version of Baton" in said.error.message
        lead.close()


def refused(address: str) -> bool:
    try:
        dial(address, b"", "worker.rank_hosts").close()
    except StartupError:
        return True
    return False


def test_a_connection_that_was_reset_as_it_was_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        def reset_at_once(*to: object) -> socket.socket:
            sock = socket.create_connection(("127.0.0.1", port))
            at_host, _ = listener.accept()
            at_host.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            at_host.close()
            watch = select.poll()
            watch.register(sock, 0)  # POLLHUP is told unasked
            assert watch.poll(60_000)
            return sock

        monkeypatch.setattr(control, "_reached", reset_at_once)
        with pytest.raises(StartupError, match=r"worker.rank_hosts: 127.* ended the connection at once"):
            dial(f"127.0.0.1:{port}", b"", "worker.rank_hosts")


def test_a_lead_waits_for_a_host_that_comes_later() -> None:
    with socket.socket() as later, ThreadPoolExecutor(1) as threads:
        later.bind(("127.0.0.1", 0))  # and refuses, until it listens
        address = f"127.0.0.1:{later.getsockname()[1]}"
        with pytest.raises(StartupError, match="no `baton ranks` answers"):
            dial(address, b"key", "worker.rank_hosts")
        waiting = threads.submit(dial, address, b"key", "worker.rank_hosts", 60.0)
        later.listen()
        with Greeter(later, SAID, partial(os.urandom, NONCE)) as greeter:
            (lead,) = wait_for(lambda: greeter.poll(1))
            with lead.sock as sock:
                answer = answer_to_lead(b"key", lead.asked, lead.said)
                assert answer is not None
                sock.sendall(answer)
                waiting.result(60).close()


def test_a_host_that_says_nothing_while_it_loads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "LOADED_S", 0.05)
    here, there = socket.socketpair()
    with here, there:
        host = RemoteHost.__new__(RemoteHost)
        host.address, host.control = "h:1", Control(here, "127.0.0.1", "127.0.0.1")
        with pytest.raises(StartupError, match=r"the ranks at h:1 took longer than 0.05 s to load"):
            host.await_loaded()
        Control(there, "127.0.0.1", "127.0.0.1").send(HostLoaded("f", 7))
        assert host.await_loaded() == HostLoaded("f", 7)  # no limit stays behind
        assert here.gettimeout() is None


def test_a_rank_that_could_not_be_told_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(sock: socket.socket, said: object, fds: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(socket, "send_fds", full)
    follower = Follower.__new__(Follower)
    here, there = socket.socketpair()
    with here, there:
        follower.rank, follower._socket = 3, here
        with pytest.raises(RankLost, match="rank 3 can't be told") as lost:
            follower.begin_tell(0, 1)
        assert lost.value.rank == 3
