"""The process that has a worker's ranks on another host: it ends with its lead, and obeys its own build alone."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from baton.engine.backends.ranks.hosts.control import NONCE, SAID, Control, answer_to_lead, dial
from baton.engine.backends.ranks.hosts.greeting import Greeter
from baton.engine.backends.ranks.hosts.messages import FROM_HOST, HostFailed, HostStart
from baton.engine.backends.ranks.hosts.session import HostSession
from baton.engine.config import EngineConfig
from baton.kernels.abi.build import sources_key
from baton.protos.errors import StartupError
from tests.e2e.fleet import wait_for
from tests.e2e.test_ranks import gone
from tests.engine.backends.ranks.other_host import children, serving_agent

FAR = ("elsewhere:1",)


@pytest.mark.thorough
def test_a_lead_that_goes_while_ranks_load_takes_them_along(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # whoever reads it waits for good
    with serving_agent() as agent:
        lead = dial(agent.address, b"", "worker.rank_hosts")
        lead.send(HostStart(EngineConfig(str(tmp_path), threads=1, pp=2, rank_hosts=FAR), 1, 1, 2, sources_key()))
        (session,) = wait_for(lambda: agent._sessions)
        (rank,) = wait_for(lambda: children(session.pid), what="a rank")
        lead.close()
        assert session.wait(60) == 0
        wait_for(lambda: gone(rank), what="the rank's end")


def test_a_lead_of_another_build_is_refused_in_words(tmp_path: Path) -> None:
    listener, config = socket.create_server(("127.0.0.1", 0)), EngineConfig(str(tmp_path), pp=2, rank_hosts=FAR)
    with listener, socket.create_connection(listener.getsockname(), 30) as lead:
        with pytest.raises(StartupError, match="another version of Baton than their lead"):
            HostSession(HostStart(config, 1, 1, 2, "others"), Control(lead))


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
